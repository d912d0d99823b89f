"""A private run of a Trainer: its loader of logical batches, its engine, and forward and backward of each batch.

Trainer sees one *ticket* for each of the `gradient_accumulation_steps` batches that it takes for a step; the last of
them stands for a whole Poisson batch, which is computed in physical ones. So its steps, schedules and epochs count
releases.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from ghostclip.data import BatchMemoryManager, DPDataLoader
from ghostclip.data.collation import unlike_pair
from ghostclip.data.out_of_memory import count_rows
from ghostclip.engine import PrivacyEngine
from ghostclip.errors import DataError
from ghostclip.integrations._host import HostTraining
from ghostclip.language.tasks import without_trace
from ghostclip.optim import DPOptimizer


class Ticket(dict[str, Any]):
    """Stands for a batch in the host's loop; holds nothing but, afterwards, how many tokens were computed.

    Attributes:
        is_last: As given.
        records: Of this process in the logical batch, afterwards.

    Args:
        is_last: Whether the logical batch is computed with it.
    """

    def __init__(self, *, is_last: bool) -> None:
        super().__init__()
        self.is_last, self.records = is_last, 0


class Tickets(Dataset[Ticket]):
    """The tickets of an epoch.

    Args:
        steps: Releases of an epoch.
        parts: Tickets for each.
    """

    def __init__(self, steps: int, parts: int) -> None:
        self._steps, self._parts = steps, parts

    def __getitem__(self, number: int) -> Ticket:
        return Ticket(is_last=(number + 1) % self._parts == 0)

    def __len__(self) -> int:
        return self._steps * self._parts


class PrivateRun:
    """What makes the training of one trainer private; lives as long as the trainer.

    Attributes:
        training: The engine, the private loader and optimizer.
        steps: Releases of an epoch.

    Args:
        dataset: The records.
        collate: Makes a batch from records.
        arguments: Training arguments joined with `PrivacyArguments`.
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any], arguments: Any) -> None:
        self._arguments = arguments
        self._records = dataset, collate
        self.training = HostTraining(
            arguments, max_grad_norm=arguments.max_grad_norm, rank=lambda: int(arguments.process_index)
        )
        self.steps = len(self._private_loader().private_sampler)
        self._pass: Iterator[Any] | None = None
        self._physical: Any = None
        self._manager: BatchMemoryManager | None = None

    @property
    def engine(self) -> PrivacyEngine:
        """What keeps the account."""
        return self.training.engine

    @property
    def optimizer(self) -> DPOptimizer | None:
        """What releases, once it is made."""
        found: DPOptimizer | None = self.training.optimizer
        return found

    # What the host is given

    def tickets(self) -> DataLoader[Ticket]:
        """Return the loader that the host iterates over: as many batches as it expects, without records."""
        parts = int(self._arguments.gradient_accumulation_steps)
        tickets = Tickets(self.steps, parts)
        # One by one by a sampler: a resumed training passes over the first ones of it.
        return DataLoader(tickets, batch_sampler=[[number] for number in range(len(tickets))], collate_fn=_only)

    def make_private(self, model: nn.Module, optimizer: Optimizer) -> Any:
        """Make the host's optimizer private.

        Args:
            model: The model, which stays what it is.
            optimizer: The host's.

        Returns:
            The private optimizer.
        """
        arguments, loader = self._arguments, self.training.loader
        assert loader is not None, "made with the run"
        model.train()
        _, private = self.training.make_private(model, optimizer, steps=self.planned_steps, wrap_model=False)
        self._manager = BatchMemoryManager(
            data_loader=loader,
            max_physical_batch_size=arguments.physical_batch or int(arguments.train_batch_size),
            optimizer=self.training.optimizer,
        )
        return private

    def releases(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer is the private one, of a training that has not ended."""
        private = self.optimizer
        return private is not None and optimizer is private and private.clipper.attached

    # A step

    def compute(self, work: Callable[[Any], Tensor], ticket: Ticket, main_input: str) -> Tensor:
        """Run forward and backward of the next logical batch, in physical ones, up to the release.

        Args:
            work: Runs forward and backward on a part and returns its mean loss.
            ticket: Is told how many tokens were computed.
            main_input: Name of the input that tokens are counted in.

        Returns:
            The mean loss; 0 of a batch without records.
        """
        assert self.optimizer is not None, "made private before the first step"
        losses: list[tuple[Tensor, int]] = []
        counts, in_parts = [0, 0], self.optimizer.clipper.is_sharded
        while True:
            batch = self._next_physical()
            token = self.optimizer.current_token
            assert token is not None, "the loader hands out batches with tokens"
            if in_parts:
                # Ranks that hold the model in parts run it equally often, on no record too.
                losses.append((work(batch), token.size))
            elif token.size:
                losses += self._physical.run(batch, lambda part: (work(part), count_rows(part) or 0))
            if token.size:
                _count(batch, main_input, counts)
            if token.is_last:
                break
            self.optimizer.step()
        ticket[main_input] = torch.empty(counts[0], device="meta")
        ticket["attention_mask"] = torch.tensor(counts[1])
        ticket.records = rows = sum(rows for _, rows in losses)
        device = self.optimizer.params[0].device
        return sum((loss * (count / rows) for loss, count in losses if count), torch.zeros((), device=device))

    def example(self) -> tuple[Any, bool]:
        """Return a batch of two records, of different lengths if there are, and whether lengths differ."""
        return unlike_pair(*self._records)

    def rehearse(self, losses: Callable[[], Tensor]) -> None:
        """Run a forward and backward whose sums are dropped; the engine's checks see it.

        Args:
            losses: Runs the model and returns the loss of each record, or a mean of them.
        """
        assert self.optimizer is not None, "made private before the first step"
        clipper = self.optimizer.clipper
        with without_trace(clipper.model), self.optimizer.rehearsal():
            clipper.backward(losses())
            clipper.reset()

    def close(self) -> None:
        """End the pass over the data, whose rest is dropped, and leave the model as it was."""
        if self._pass is not None:
            self._pass.close()  # type: ignore[attr-defined]
            self._pass = None
        self.training.leave()

    def epsilon(self) -> float:
        """Return ε at the δ that was given, of all releases up to now."""
        return self.training.epsilon()

    @property
    def physical_batch_size(self) -> int:
        """The most records that are computed at once now."""
        assert self._manager is not None, "made private before"
        return self._manager.physical_batch_size

    def _next_physical(self) -> Any:
        for _ in range(2):
            if self._pass is None:
                assert self._manager is not None, "made private before the first step"
                self._physical = self._manager.__enter__()
                self._pass = iter(self._physical)
            try:
                return next(self._pass)
            except StopIteration:
                self._pass = None
        raise DataError("the private loader hands out no further batch (a budget is spent?).")

    @property
    def planned_steps(self) -> int:
        """Releases of the whole training, as the host counts them."""
        if self._arguments.max_steps > 0:
            return int(self._arguments.max_steps)
        return math.ceil(self._arguments.num_train_epochs * self.steps)

    def _private_loader(self) -> DPDataLoader:
        arguments, (dataset, collate) = self._arguments, self._records
        workers = int(arguments.dataloader_num_workers)
        each, parts = int(arguments.train_batch_size), int(arguments.gradient_accumulation_steps)
        plain = DataLoader(
            dataset,
            batch_size=each,
            collate_fn=collate,
            num_workers=workers,
            pin_memory=arguments.dataloader_pin_memory and torch.cuda.is_available(),
            prefetch_factor=arguments.dataloader_prefetch_factor if workers else None,
        )
        ranks = int(arguments.world_size)
        return self.training.private_loader(plain, ranks=ranks, accumulated=parts, place="train_dataset")


def _only(batch: list[Ticket]) -> Ticket:
    return batch[0]


def _count(part: Any, main_input: str, counts: list[int]) -> None:
    """Add the tokens of a part to those counted: all, and those that are no padding."""
    main, mask = part.get(main_input), part.get("attention_mask")
    if isinstance(main, Tensor):
        counts[0] += main.numel()
        counts[1] += int(mask.sum()) if isinstance(mask, Tensor) else main.numel()
