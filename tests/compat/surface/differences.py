"""What runs under the same name and does something else on purpose, each with the test that shows it."""

from __future__ import annotations

from typing import Final, NamedTuple


class Difference(NamedTuple):
    """One thing that behaves otherwise."""

    what: str
    opacus: str
    here: str
    test: str
    """Where it is shown, as `file::function`."""


_FILE = "tests/compat/test_differences.py"

DIFFERENCES: Final[tuple[Difference, ...]] = (
    Difference(
        "losses of shape [B, 1] in ghost mode",
        "are multiplied with the coefficients [B] into B×B: every sample's gradient is scaled by the sum of all "
        "coefficients, and the bound does not hold",
        "one value a sample is one value a sample: exact",
        f"{_FILE}::test_losses_of_shape_b_1",
    ),
    Difference(
        "a criterion that returns a scalar in ghost mode",
        "the sum of all coefficients multiplies the mean: every sample is scaled alike, none is clipped by itself",
        "refused: it must give one loss per sample, or the default strategy be used",
        f"{_FILE}::test_scalar_criterion_in_ghost_mode",
    ),
    Difference(
        "loss.backward() on a loss that was not wrapped, in ghost mode",
        "the step releases an unclipped gradient and the account counts it",
        "one backward, clipped exactly, with a warning that it keeps more than two would",
        f"{_FILE}::test_unwrapped_loss_in_ghost_mode",
    ),
    Difference(
        "two backwards before a step in ghost mode",
        "the first one is lost",
        "both count: exact, and the step is charged for them",
        f"{_FILE}::test_two_backwards_in_ghost_mode",
    ),
    Difference(
        "a schedule of the clip bound in ghost mode",
        "moves the noise but not the clipping, which keeps a copy of C: too little noise where C falls",
        "one C, which clipping and noise both read",
        f"{_FILE}::test_schedule_of_the_bound_in_ghost_mode",
    ),
    Difference(
        'clipping="adaptive" in ghost mode',
        "refused; a criterion of its own moves the bound",
        "works in every strategy, the noisy count being part of the step",
        f"{_FILE}::test_adaptive_clipping_in_ghost_mode",
    ),
    Difference(
        "the expected batch size of N = 147 records in batches of 3",
        "2: the product of N and a rounded rate is truncated, so that every update is half as long again",
        "what the loader was given",
        f"{_FILE}::test_expected_batch_size",
    ),
    Difference(
        "MultiheadAttention with batch_first and several heads, replaced by ModuleValidator.fix",
        "computes another function: heads are mixed with positions",
        "is torch's module, which is clipped as it is",
        f"{_FILE}::test_attention_is_the_same_function",
    ),
    Difference(
        "the group norm that ModuleValidator.fix puts in the place of a BatchNorm1d of C channels",
        "has gcd(32, C) groups: of one channel each for C = 16 or 32, so that it gives zeros after a linear layer",
        "has groups of at least 8 channels; num_groups= says otherwise, as a model trained after Opacus's fix needs it",
        f"{_FILE}::test_groups_of_a_replaced_batch_norm",
    ),
    Difference(
        "secure_mode=True",
        "needs torchcsprng, which no longer exists for present versions of torch",
        "noise from a ChaCha20 keystream; a further package only makes it fast",
        f"{_FILE}::test_secure_mode",
    ),
    Difference(
        "a misspelt option",
        "is swallowed: posson_sampling=False trains with Poisson sampling",
        "is an error",
        f"{_FILE}::test_misspelt_option",
    ),
    Difference(
        "scripts' state_dict()",
        "has the prefix _module. in every key",
        "has the model's own keys; states with the prefix load too",
        f"{_FILE}::test_keys_of_the_state",
    ),
    Difference(
        "p.grad between backward and step",
        "is the ordinary gradient of the batch, not private and not clipped",
        "is None: the clipped sum stays with the engine until it has noise. p.grad_sample is the same as Opacus's in "
        "hooks mode",
        f"{_FILE}::test_gradients_between_backward_and_step",
    ),
    Difference(
        "poisson_sampling=False",
        "batches of a fixed size are accounted as if they were Poisson samples: the ε that it states is too low",
        "a pass counts as one full participation of every record, with a warning",
        f"{_FILE}::test_fixed_batches_are_no_samples",
    ),
    Difference(
        "len(accountant)",
        "counts the entries of its history",
        "counts releases; `history` is the same",
        f"{_FILE}::test_length_of_an_account",
    ),
    Difference(
        "backwards between disable_hooks() and enable_hooks()",
        "put ordinary gradients into p.grad, which nobody clips",
        "are clipped and count like any other; disable_hooks() warns that it switches nothing off",
        f"{_FILE}::test_hooks_are_not_switched_off",
    ),
    Difference(
        "forbid_grad_accumulation(), which Opacus's make_private calls for Poisson batches",
        "makes a second backward before a step an error",
        "changes nothing: k backwards are accounted as what they are, σ/k at rate k·q, with a warning",
        f"{_FILE}::test_accumulation_is_accounted",
    ),
    Difference(
        "a bound that a criterion adapts (DPLossFastGradientAdaptiveClipping)",
        "moves in every backward, before the gradients are clipped to it, by a count that is made noisy at once",
        "moves in the step, whose σ covers the noisy count; the criterion only says how",
        f"{_FILE}::test_adaptive_criterion_moves_the_bound_in_the_step",
    ),
    Difference(
        "BatchSplittingSampler with workers that prefetch",
        "queues what each batch is, and mixes logical batches after a loop that is left early",
        "is an error that names BatchMemoryManager, which works with any number of workers",
        f"{_FILE}::test_splitting_sampler_refuses_to_run_ahead",
    ),
    Difference(
        "torch.manual_seed(s)",
        "fixes noise and batches, so that whoever guesses the seed, or uses 0 or 42 as all do, can take the noise away",
        "fixes neither: both come from entropy of the operating system. For a run that can be repeated: "
        "noise_generator=, and a generator of the loader; both warn",
        f"{_FILE}::test_global_seed_does_not_fix_the_noise",
    ),
    Difference(
        "p.grad_sample where nothing formed per-sample gradients (ghost mode, or before a backward)",
        "is None: every parameter has the attribute once a model is wrapped",
        "raises AttributeError: nothing is hung on parameters but in hooks mode, by a backward. "
        'getattr(p, "grad_sample", None) works with both',
        f"{_FILE}::test_parameters_have_no_attribute_of_ours",
    ),
    Difference(
        "load_checkpoint into a training of another noise multiplier, bound or sampling rate",
        "goes on with the new values without a word, and with whatever noise the seed gives",
        "is a ResumeError (a ValueError) that names each difference, because a value that was mistyped would change "
        "the guarantee; allow_mechanism_change=True goes on, with noise that was never used before",
        f"{_FILE}::test_checkpoint_of_another_mechanism",
    ),
    Difference(
        "DPOptimizer(...) made before GradSampleModule(...)",
        "works, since it looks for p.grad_sample in step(); where the model is never wrapped, step() fails",
        "is refused with the remedy: the clipper keeps C and the sums, so the optimizer is made with it and checks at "
        "once that it covers every parameter. Wrap the model first, or pass clipper=",
        f"{_FILE}::test_optimizer_before_the_model",
    ),
    Difference(
        "a batch norm without trainable parameters, in training mode",
        "is accepted: samples mix in it, so that gradients of all other layers depend on the whole batch",
        "is refused like any other; in eval mode it is accepted",
        f"{_FILE}::test_frozen_batch_norm",
    ),
    Difference(
        "ModuleValidator.VALIDATORS and FIXERS of LSTM, GRU and MultiheadAttention",
        "have entries: these modules are replaced by others",
        "have none: these modules are clipped as they are, and fix() leaves them",
        f"{_FILE}::test_modules_that_need_no_fixer",
    ),
    Difference(
        "an accountant of one's own, with step, get_epsilon, __len__ and mechanism",
        "is all there is: what it says is believed",
        "is told of every release, and get_epsilon() is what it says; budgets, epsilon_bounds() and the noise for a "
        "target go by bounds that are proved",
        f"{_FILE}::test_accountant_of_ones_own",
    ),
    Difference(
        "ModuleValidator on a model in evaluation mode",
        "reports an error: training mode is wanted",
        "looks at the modules alone: libraries load models in evaluation mode. make_private refuses such a model, in "
        "the class that Opacus raises",
        f"{_FILE}::test_validator_of_a_model_in_evaluation_mode",
    ),
    Difference(
        "load_state_dict of an accountant with the state of another method",
        "is an error",
        "takes the history over: what was released does not depend on how it is accounted",
        f"{_FILE}::test_state_of_another_accountant",
    ),
    Difference(
        "the batch axis of an empty batch",
        "is what batch_first says, of every tensor alike",
        "is the axis on which a batch of two records is longer than one of one record",
        f"{_FILE}::test_axis_of_an_empty_batch",
    ),
    Difference(
        "step() on records that the private loader did not draw",
        "releases, and the account counts a Poisson sample that nobody drew",
        "is a DrawError: where rows are left out, added or doubled, and where an input of the model is a tensor of "
        "another batch of the loader; of copies only their number is compared. DeclaredSampling states a sampling of "
        "one's own",
        f"{_FILE}::test_step_without_a_draw",
    ),
)
