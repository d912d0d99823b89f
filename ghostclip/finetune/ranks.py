"""The processes of a run, as torchrun has started them, and how they divide the work.

All of them prepare the same run: rank 0 chooses the folder, draws seeds, writes and prints, and each exchanges with the
others what only it knows. What one of them refuses all of them refuse.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ghostclip.errors import GhostClipError, InvalidOptionError

if TYPE_CHECKING:
    import torch

    from ghostclip.finetune.options import FinetuneOptions
    from ghostclip.scaling import Mesh

_PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK")


@dataclass(frozen=True)
class Ranks:
    """The processes of a run; one, unless torchrun has started several.

    Attributes:
        count: How many there are.
        rank: Number of this one.
        here: Its number among those of its machine, which is that of its GPU.
        on_machine: How many of them its machine has.
    """

    count: int = 1
    rank: int = 0
    here: int = 0
    on_machine: int = 1

    @classmethod
    def started(cls, environment: Mapping[str, str] = os.environ) -> Ranks:
        """Read what torchrun says to a process it starts.

        Args:
            environment: Its variables.

        Returns:
            The processes.

        Raises:
            InvalidOptionError: There are several, and nothing says where they meet.
        """
        ranks = environment.get("WORLD_SIZE", "1")
        count = int(ranks) if ranks.isdecimal() else 1
        if count <= 1:
            return cls()
        missing = [name for name in _PLACE if name not in environment]
        if missing:
            raise InvalidOptionError(
                f"WORLD_SIZE={count} without {', '.join(missing)}: start the processes with torchrun "
                f"--nproc-per-node {count} -m ghostclip finetune, or unset WORLD_SIZE for one"
            )
        rank = int(environment["RANK"])
        here = int(environment.get("LOCAL_RANK", rank))
        return cls(count, rank, here, int(environment.get("LOCAL_WORLD_SIZE", count)))

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which prints and writes."""
        return self.rank == 0

    @property
    def command(self) -> str:
        """What a run with as many processes begins with on a command line."""
        if self.count == 1:
            return "ghostclip finetune"
        machines = self.count // self.on_machine
        several = f" --nnodes {machines} ..." if machines > 1 else ""
        return f"torchrun{several} --nproc-per-node {self.on_machine} -m ghostclip finetune"

    def mesh(self, text: str | None) -> Mesh:
        """Return how the model lies on the processes.

        Args:
            text: What ``--mesh`` says; None for a copy of the model on each.

        Returns:
            The mesh.

        Raises:
            InvalidOptionError: It is of another number of processes, or has axes of other programs.
        """
        from ghostclip.scaling import Mesh

        if text is None:
            return Mesh(replicate=self.count)
        mesh = Mesh.parse(text)
        if mesh.cp * mesh.pp > 1:
            raise InvalidOptionError(
                f"--mesh {text}: positions (cp) and stages (pp) are divided by a model's own code. Use "
                "replicate, dp and tp here"
            )
        if mesh.devices != self.count:
            raise InvalidOptionError(
                f"--mesh {text} is of {mesh.devices} processes, but there {_are(self.count)}: start them with torchrun "
                f"--nproc-per-node {mesh.devices} -m ghostclip finetune, or name a mesh of {self.count}"
            )
        return mesh

    def device(self, name: str) -> torch.device:
        """Return the device of this process, and make it the one that torch uses.

        Args:
            name: What ``--device`` says, of one kind for all processes.

        Returns:
            The device.

        Raises:
            InvalidOptionError: Several processes would share it.
        """
        import torch

        if self.count == 1 or name == "cpu":
            return torch.device(name)
        if name != "cuda":
            raise InvalidOptionError(
                f"--device {name} with {self.count} processes: each has its own; say cpu, cuda or auto"
            )
        if self.on_machine > torch.cuda.device_count():
            raise InvalidOptionError(
                f"--device cuda: {self.on_machine} processes on this machine, which has {torch.cuda.device_count()} "
                f"GPU(s): start one for each (--nproc-per-node {torch.cuda.device_count()}), or say --device cpu"
            )
        torch.cuda.set_device(self.here)
        return torch.device("cuda", self.here)


ALONE = Ranks()
"""One process."""


@contextmanager
def joined(ranks: Ranks) -> Iterator[None]:
    """Let the processes meet, and all but rank 0 be silent.

    A process that raises leaves at once, without waiting for the others: torchrun ends them then.

    Args:
        ranks: The processes.

    Yields:
        Nothing.
    """
    if ranks.count == 1:
        yield
        return
    import torch

    # Its functions have the world as a default argument: with one there already, it would never be let go.
    import torch.distributed.nn.functional
    from torch import distributed

    # What is exchanged beside sums of gradients is small, and need not wait for a GPU.
    on_gpus = torch.cuda.is_available() and distributed.is_nccl_available()
    distributed.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    with ExitStack() as stack:
        if not ranks.is_first:
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(nowhere))
            stack.enter_context(redirect_stderr(nowhere))
        yield
    distributed.destroy_process_group()


@contextmanager
def refused_by_all(what: str) -> Iterator[None]:
    """Let what one process refuses be refused by all; one that fails otherwise leaves, and waits for nobody.

    Args:
        what: What is done inside, for messages.

    Yields:
        Nothing.

    Raises:
        GhostClipError: In all processes, if one of them raised one.
        OSError: In the process that raised it; the others raise a `GhostClipError`.
    """
    from ghostclip.distributed.agreement import gathered, tell_refusal

    try:
        yield
    except (GhostClipError, OSError) as error:
        tell_refusal(what, error)
        raise
    gathered(what, None)


def require_same(options: FinetuneOptions) -> None:
    """Refuse processes that were given different options; called in all of them.

    Args:
        options: Those of this one.

    Raises:
        InvalidOptionError: In all processes, if they differ.
    """
    from ghostclip.distributed import gathered

    found = gathered("options", options.recorded())
    for rank, other in enumerate(found):
        for name, value in found[0].items():
            if other[name] != value:
                raise InvalidOptionError(
                    f"--{name.replace('_', '-')} is {other[name]} in process {rank} and {value} in process 0: start "
                    "all of them with the same options"
                )


def is_broken_connection(error: RuntimeError) -> bool:
    """Return whether an error says that another process does not answer any more.

    Args:
        error: What torch has raised.

    Returns:
        True if so.
    """
    from torch import distributed

    return "gloo" in str(error) or isinstance(error, distributed.DistError)


def _are(count: int) -> str:
    return "is 1" if count == 1 else f"are {count}"
