"""A mesh of devices by the names of its axes."""

from dataclasses import astuple, dataclass, fields
from math import prod
from typing import Final

from ghostclip._validate import did_you_mean
from ghostclip.errors import InvalidOptionError

# Axes of other parallelisms, by what planning them would need.
_UNPLANNED: Final = {"ep": "experts spread over ranks"}


@dataclass(frozen=True)
class Mesh:
    """Devices in up to five axes.

    Attributes:
        replicate: Copies of the sharded model (HSDP).
        dp: Ranks that shard parameters, gradients and optimizer state, each with samples of its own (FSDP2).
        tp: Ranks that share every sample, with a part of each large matrix (tensor parallelism).
        cp: Ranks that share every sample, with a part of its positions (context parallelism).
        pp: Ranks that share every sample, with a part of the blocks (stages of a pipeline).
    """

    replicate: int = 1
    dp: int = 1
    tp: int = 1
    cp: int = 1
    pp: int = 1

    @property
    def devices(self) -> int:
        """How many there are."""
        return prod(astuple(self))

    @property
    def data_ranks(self) -> int:
        """How many groups of devices have samples of their own."""
        return self.replicate * self.dp

    def __str__(self) -> str:
        """Return the axes as they are written."""
        return ",".join(f"{axis.name}={getattr(self, axis.name)}" for axis in fields(self) if self._shows(axis.name))

    def _shows(self, name: str) -> bool:
        return name == "dp" or getattr(self, name) > 1

    @classmethod
    def parse(cls, text: str) -> "Mesh":
        """Read axes as they are written.

        Args:
            text: As ``"dp=8,tp=4"``, axes that are left out being of size 1.

        Returns:
            The mesh.

        Raises:
            InvalidOptionError: An axis is unknown, named twice or has no size.
        """
        sizes: dict[str, int] = {}
        known = [axis.name for axis in fields(cls)]
        for part in text.split(","):
            name, _, size = (piece.strip() for piece in part.partition("="))
            if name in _UNPLANNED:
                raise InvalidOptionError(
                    f"mesh {text!r}: {_UNPLANNED[name]} are not planned. Leave {name} out; "
                    "replicate, dp, tp, cp and pp are."
                )
            if name not in known:
                raise InvalidOptionError(
                    f"mesh {text!r}: no axis {name!r}; axes are {', '.join(known)}{did_you_mean(name, known)}"
                )
            if name in sizes or not size.isdecimal() or int(size) < 1:
                raise InvalidOptionError(f"mesh {text!r}: {part!r} should name one axis with its size, as dp=8.")
            sizes[name] = int(size)
        return cls(**sizes)
