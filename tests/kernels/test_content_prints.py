"""Numbers that tell a tensor's content: exact sums, whatever the device, the order of additions or the type."""

from __future__ import annotations

import torch

from ghostclip.distributed import release
from ghostclip.kernels.sums import WIDTH, content_prints


def test_any_change_is_seen():
    values = torch.randn(3 * WIDTH + 100)
    changed = []
    for place in (0, 5, WIDTH, 3 * WIDTH + 99):
        for bit in (0, 1, 30):
            one = values.clone()
            one.view(torch.int32)[place] ^= 1 << bit
            changed.append(one)
    flipped = values.clone()
    flipped[7:9] *= -1
    rows = values[: 3 * WIDTH].view(3, WIDTH)
    changed += [flipped, values.flip(0), values[:-1], torch.cat((rows[[1, 0, 2]].flatten(), values[3 * WIDTH :]))]
    changed += [torch.cat((values, torch.zeros(1)))[1:], torch.zeros_like(values), -torch.zeros_like(values)]
    told = {tuple(content_prints([one]).tolist()) for one in [values, *changed]}
    assert len(told) == len(changed) + 1


def test_a_release_is_told_by_its_values_types_and_shapes(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    released = [torch.randn(shape, generator=generator) for shape in ((3, 5), (), (0,), (70, 61), (4,))]
    same = [tensor.clone().t().contiguous().t() if tensor.dim() == 2 else tensor.clone() for tensor in released]
    assert release.fingerprint(released) == release.fingerprint(same)
    assert len(release.fingerprint(released)) == 32
    others = [
        [tensor.view(5, 3) if tensor.shape == (3, 5) else tensor for tensor in released],
        [released[1], released[0], *released[2:]],
        [*released[:4], released[4].to(torch.float64)],
        [*released[:3], released[3].nextafter(torch.tensor(9.0)), released[4]],
        released[:4],
    ]
    assert len({release.fingerprint(one) for one in [released, *others]}) == 6
    monkeypatch.setattr(release, "_PRINTED", 4000)
    assert release.fingerprint(same) == release.fingerprint([tensor.clone() for tensor in released])
