"""Two backwards through one forward: the first for the norms, the second for the clipped sums."""

import hashlib

import torch
from torch import Tensor

from ghostclip.clipping.held_factors import Repeats
from ghostclip.clipping.norms import GroupNorms
from ghostclip.clipping.passes import NormPass, SumPass
from ghostclip.clipping.state import ClippingState
from ghostclip.kernels.products import full_precision


class TwoPasses:
    """Runs the strategies "ghost" and "fast"."""

    # A backward for norms is run again where a parameter turned out to be used several times, which only its later uses
    # show, and once more, for a few samples in float64, where rounding may have changed their norms.
    def __init__(self, state: ClippingState) -> None:
        self._state = state
        self._several: set[str] = set()

    def run(self, loss: Tensor, *, scale: float, instantiate: bool) -> None:
        """Add the clipped sums of a batch from a scalar loss."""
        # ``instantiate`` forms per-sample gradients for the norms.
        state = self._state
        repeats = Repeats(loss, loss.grad_fn, count=sum(state.capture.forward.use_counts.values()))
        norms, total, same_uses, ill_conditioned_B = self._measure(loss, repeats, instantiate=instantiate)
        weights = state.decisions.weights(total, state.forward_of(norms), scale, ill_conditioned_B)
        expected = norms.seen if same_uses else None
        sums = SumPass(
            state.store, weights, repeats=repeats, expected=expected, several=norms.several, ranks=state.ranks
        )
        sums.take_kept(norms.kept)

        def add() -> None:
            state.listen(sums, loss.backward)
            sums.streams.join()
            with torch.no_grad(), full_precision():
                sums.finish()
                state.require(repeats)

        state.all_or_nothing(add)
        sums.streams.part()
        state.close(norms)

    def _measure(
        self, loss: Tensor, repeats: Repeats, *, instantiate: bool
    ) -> tuple[NormPass, GroupNorms, bool, Tensor | None]:
        """Run backwards until the norms of all samples are certain."""
        # Returns the last pass, the norms, whether it met all uses, and the samples that were measured in float64.
        state = self._state
        group_of = state.groups()
        index_D: Tensor | None = None
        total: GroupNorms | None = None
        ill_conditioned_B: Tensor | None = None
        while True:
            norms = NormPass(
                group_of,
                shared=self._several,
                repeats=repeats,
                instantiate=instantiate,
                index_D=index_D,
                ranks=state.ranks,
            )
            same_uses = state.listen(norms, lambda: state.capture.run_backward([loss], [None]))
            if self._any_rank(same_uses is None or bool(norms.late), norms):
                self._several |= norms.late
                repeats.begin_again(anew=total is None)
                continue
            repeats.begin_again()
            norms.streams.join()
            with torch.no_grad(), full_precision():
                found = norms.norms()
                if total is not None:
                    if index_D is not None:
                        ill_conditioned_B = total.refine(found, index_D)
                    break
                total = found
                imprecise_B = self._imprecise_B(total)
            if not self._any_rank(imprecise_B is not None, norms):
                break
            index_D = None if imprecise_B is None else imprecise_B.nonzero().squeeze(1)
        return norms, total, bool(same_uses), ill_conditioned_B

    def _any_rank(self, again: bool, norms: NormPass) -> bool:  # noqa: FBT001 - what is asked, no option
        """Return whether a rank needs the backward again: where parameters are gathered for it, all take part."""
        sharded = self._state.sharded
        if sharded is None:
            return again
        order = int.from_bytes(hashlib.blake2b(repr(norms.order).encode(), digest_size=7).digest(), "big")
        found = sharded.agree("second backward", 2 * order + again)
        sharded.delivery.order(at_once=len({value // 2 for value in found}) == 1)
        return any(value % 2 for value in found)

    def _imprecise_B(self, total: GroupNorms) -> Tensor | None:
        """Read which norms must be computed in float64, and whether the step before repeated itself, with one wait."""
        doubt = self._state.take_doubt()
        imprecise_B = total.imprecise_B(None if doubt is None else doubt.differs_K.any())
        if doubt is not None and not total.finite:
            doubt.require()
        return imprecise_B
