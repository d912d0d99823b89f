"""A DCGAN draws digits: its discriminator, which alone sees data, is trained privately, and its generator follows.

What the generator reaches is told by the sliced Wasserstein distance between its images and fresh digits.
"""
# ruff: noqa: T201 - an example prints what it finds

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from ghostclip import PrivacyEngine
from paper_repro.examples.data import digits
from paper_repro.examples.options import options_of

LATENT = 32


def small_digits(samples: int) -> TensorDataset:
    """Draw digits of 16 x 16 pixels.

    Args:
        samples: How many.

    Returns:
        Images in [-1, 1].
    """
    images, _ = digits(samples).tensors
    return TensorDataset(F.interpolate(images, size=16, mode="area").clamp(-1, 1))


def networks() -> tuple[nn.Sequential, nn.Sequential]:
    """Make a generator, and a discriminator without batch norms.

    Returns:
        Both.
    """
    generator = nn.Sequential(
        nn.ConvTranspose2d(LATENT, 64, 4, 1, 0, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(64, 32, 4, 2, 1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.ConvTranspose2d(32, 1, 4, 2, 1, bias=False),
        nn.Tanh(),
    )
    discriminator = nn.Sequential(
        nn.Conv2d(1, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 32, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(32, 1, 4, 1, 0),
        nn.Flatten(0),
    )
    return generator, discriminator


@torch.no_grad()
def distance(first: Tensor, second: Tensor, directions: int = 256) -> float:
    """Return the mean distance of two sets of images along random directions.

    Args:
        first: Images `[B, 1, H, W]`.
        second: As many.
        directions: How many directions.

    Returns:
        The sliced Wasserstein distance.
    """
    along = F.normalize(torch.randn(first[0].numel(), directions), dim=0)
    sorted_by_place = [(images.flatten(1) @ along).sort(dim=0).values for images in (first, second)]
    return (sorted_by_place[0] - sorted_by_place[1]).abs().mean().item()


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """Train.

    Args:
        arguments: The command line; the process's own by default.

    Returns:
        Distance before and after, and ε.
    """
    options = options_of(
        "dcgan", __doc__, arguments, samples=6000, epochs=6, batch_size=128, lr=1e-3, noise_multiplier=0.6
    )
    dataloader = DataLoader(small_digits(options.samples), batch_size=options.batch_size, shuffle=True)
    fresh, noise = small_digits(500).tensors[0], torch.randn(500, LATENT, 1, 1)

    generator, discriminator = networks()
    optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=options.lr, betas=(0.5, 0.999))
    optimizer_g = torch.optim.Adam(generator.parameters(), lr=options.lr, betas=(0.5, 0.999))
    privacy_engine = PrivacyEngine()
    discriminator, optimizer_d, dataloader = privacy_engine.make_private(
        module=discriminator,
        optimizer=optimizer_d,
        data_loader=dataloader,
        noise_multiplier=options.sigma,
        max_grad_norm=options.max_grad_norm,
    )
    criterion = nn.BCEWithLogitsLoss()
    before = distance(generator(noise), fresh)
    other = distance(small_digits(500).tensors[0], fresh)
    print(f"distance to fresh digits: {before:.3f} untrained, {other:.3f} of other digits")
    for epoch in range(1, options.epochs + 1):
        for (real,) in dataloader:
            fake = generator(torch.randn(options.batch_size, LATENT, 1, 1))

            # A real image and a made one count as one record: what it shows the discriminator is clipped as a whole.
            optimizer_d.zero_grad()
            made = discriminator(fake.detach()[torch.arange(len(real)) % options.batch_size])
            seen = discriminator(real)
            loss_d = criterion(made, torch.zeros_like(made)) + criterion(seen, torch.ones_like(seen))
            loss_d.backward()
            optimizer_d.step()

            # The generator never sees data: what it learns from the discriminator is private already.
            optimizer_g.zero_grad()
            judged = discriminator(fake)
            loss_g = criterion(judged, torch.ones_like(judged))
            loss_g.backward()
            optimizer_g.step()
            optimizer_d.zero_grad()
        after = distance(generator(noise), fresh)
        epsilon = privacy_engine.get_epsilon(options.delta)
        print(
            f"epoch {epoch}: losses {loss_d.item():.3f}, {loss_g.item():.3f}; distance {after:.3f}, ε = {epsilon:.2f}"
        )
    return {"before": before, "after": after, "epsilon": epsilon}


if __name__ == "__main__":
    main()
