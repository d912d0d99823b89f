"""Random programs that stand between a loader and `backward()`: inputs, targets and losses out of torch's operations.

Whether a program keeps records apart is known from autograd alone: how much a record adds to the gradient must not
depend on which other records there are. What the library makes of it is measured as for any other loop.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import short_line, write
from benchmarks.loops.report import first_sentence
from tests.loops.loop import Loop
from tests.loops.models import functional, mlp, tagger
from tests.loops.oracle import measure
from tests.loops.world import FEATURES, World

# Inputs x (B, 4), targets y (B,) of three classes. What is on the left keeps records apart.
_INPUTS = (
    (
        "x * 2", "x / x.norm(dim=1, keepdim=True)", "x.clamp(-1, 1)", "x[:, [1, 0, 3, 2]]", "x.flip(1)",
        "F.layer_norm(x, (4,))", "x.where(y[:, None] > 0, -x)", "x + x.detach().sign()", "torch.cat([x[:2], x[2:]])",
        "x.clone().mul_(0.5)", "x.T.contiguous().T", "x - torch.tensor([0.1, 0.2, 0.3, 0.4])", "x.sort(1).values",
        "x.index_select(0, torch.arange(len(x)))", "torch.stack(list(x))",
    ),
    (
        "x - x.mean(0)", "x / (x.std(0, unbiased=False) + 0.1)", "x - x[:1]", "x - x[-1:]", "x * x[0, 0]",
        "torch.lerp(x, x.flip(0), 0.3)", "x[torch.randperm(len(x))] * 0.5 + x", "x / x.abs().max()",
        "x - x.median(0).values", "torch.where(x > x.mean(), x, 0.5 * x)", "x + 0.1 * x[y.argmax()]", "x.cumsum(0)",
        "x @ (x.T @ x) / len(x)", "F.normalize(x, dim=0)", "(x - x.min()) / (x.max() - x.min() + 0.1)",
        "x * y.double().mean()", "torch.where((y == y[0])[:, None], x, -x)", "x.roll(1, 0)",
        "x * torch.quantile(x, 0.9)", "F.batch_norm(x, None, None, training=True)",
        "x.index_copy(0, torch.tensor([0]), x[-1:])", "torch.cat([x[1:], x[:1]])",
        "x * (1.0 + y.bincount(minlength=3).max())", "x - x.split(2)[0].mean(0)",
        "x + x.unbind(0)[0]", "x.masked_fill(x > x.mean(), 0.0)", "x * torch.einsum('bi,bi->', x, x)",
        "x + torch.cdist(x, x).argmin(1, keepdim=True)", "x * (x[:, :1] > x[:, 0].mean())",
        "x * (x[:, :1] > 0.5 * x[:, 0].max())",
    ),
)  # fmt: skip
_TARGETS = (
    ("(y + 1) % 3", "torch.where(x[:, 0] > 1, y, 0 * y)", "y.clamp(max=1)", "model(x).detach().argmax(1)"),
    (
        "y.flip(0)", "y.mode().values.expand(len(y))", "torch.where(x[:, 0] > x[:, 0].mean(), y, 0 * y)",
        "x[:, 0].argsort() % 3", "torch.where(y == y[:1], y, 0 * y)", "model(x).detach().softmax(0).argmax(1)",
        "torch.where((p := model(x).detach().max(1).values) > p.median(), y, 0 * y)",
    ),
)  # fmt: skip
_OUTPUTS = ("model(x)", "model(x)", "model(x * 1.1)", "model(x.flip(1))", "model(x + 0.1)")
_ROWS = (
    "{a}.tanh()", "{a}.softmax(1)", "{a}.log_softmax(-1)", "F.normalize({a}, dim=1)", "{a} - {a}.mean(1, keepdim=True)",
    "{a} * x[:, :1]", "{a}.sort(dim=1).values", "{a}.cumsum(1)", "torch.cat([{a}, x], 1)[:, :3]", "{a}.clamp(min=-1)",
)  # fmt: skip
_NUMBERS = (
    "x[:, 0]", "x[:, 1].abs()", "y.double()", "(y == 0).double()", "(x[:, 1] > 0.7).double()", "x.norm(dim=1)",
)  # fmt: skip
_LOSSES = (
    "F.cross_entropy({a}, y, reduction='none')", "F.cross_entropy({a}, y, reduction='none')", "{a}[:, 0]",
    "{a}.gather(1, y[:, None]).squeeze(1)", "{a}.logsumexp(1)", "{a}.square().sum(1)", "{a}.max(1).values",
    "F.mse_loss({a}, x[:, :3], reduction='none').mean(1)", "torch.einsum('bi,bi->b', {a}, x[:, :3])",
    "F.binary_cross_entropy_with_logits({a}[:, 0], (y > 0).double(), reduction='none')",
    "F.cosine_similarity({a}, x[:, :3], dim=1)", "F.multi_margin_loss({a}, y, reduction='none')",
    "F.gaussian_nll_loss({a}[:, 0], x[:, 0], F.softplus({a}[:, 1]) + 0.1, reduction='none')",
)  # fmt: skip
_EACH = (
    (
        "{a}.tanh()", "{a} * 0.7", "F.softplus({a})", "{a}.square()", "{a}.clamp(max=1.5)", "{a} + {b}", "{a} * {b}",
        "(1 - (-{a}).exp()) ** 2 * {a}", "torch.stack([{a}, {a} * 2], 1).sum(1)", "{a} * {a}.detach()", "{a} + {c}",
        "{a} * {c}", "torch.where({c} > 0.5, {a}, 0.5 * {a})", "F.huber_loss({a}, x[:, 0], reduction='none')",
    ),
    (
        "{a} - {b}.detach().mean()", "{a} * {b}.mean()", "{a} * {b}.detach().softmax(0)", "{a}.cumsum(0)",
        "{a} / (1 + {b}.detach().abs().sum())", "{a} * ({b}.detach() > {b}.detach().mean())", "{a} - {a}.flip(0)",
        "{a} * ({c} >= {c}.max())", "{a} * {b}.argsort()", "{a} * {a}.detach().roll(1)", "{a} * len({a})",
        "{a}.topk(len({a}) // 2).values", "{a}[{b}.detach() > {b}.detach().median()]", "{a} * (len({a}) % 2 + 1)",
        "({a}[:, None] - {a}[None, :]).abs().mean(1)", "{a} * float({b}.detach().sum())", "{a} * {b}.sum().item()",
        "{a} * torch.bincount(y, minlength=3)[y]", "{a} * (y == y[0])", "{a} * (1.0 + torch.isin(y, y[:1]))",
        "{a} / torch.bincount(y, minlength=3)[y]", "{a} * {c}.std(unbiased=False)", "{a} * x.abs().max(0).values[0]",
        "{a}.clamp(max={b}.detach().max() * 0.8)", "{a} * torch.cdist(x, x).mean(1)", "{a} - {a}.detach().logsumexp(0)",
        "{a} * ({b}.detach()[:, None] >= {b}.detach()).double().mean(1)", "torch.cat([{a}, {a}.sum().reshape(1)])",
    ),
)  # fmt: skip
_ALL = (
    (
        "{a}.mean()", "{a}.mean()", "{a}.sum() / len(x)", "({a} / len(x)).sum()", "{a}.mean() * 0.5",
        "({a} * {c}).mean()", "{a}.mean() + 0.3 * {b}.mean()", "F.cross_entropy({m}, y, label_smoothing=0.1)",
        "F.mse_loss({m}, x[:, :3])", "F.kl_div({m}.log_softmax(1), x[:, :3].softmax(1), reduction='batchmean')",
        "F.smooth_l1_loss({m}[:, 0], x[:, 0])", "F.nll_loss({m}.log_softmax(1), y)", "F.multi_margin_loss({m}, y)",
        "F.cosine_embedding_loss({m}, x[:, :3], 2.0 * (y > 0) - 1)", "F.poisson_nll_loss({m}[:, 0], y.double())",
    ),
    (
        "({a} * {c}).sum() / ({c}.sum().abs() + 1e-3)", "{a}.logsumexp(0)", "{a}.mean().square()", "{a}.max()",
        "({a}.square().mean() + 1e-9).sqrt()", "({a} @ {a}) / len(x)", "{a}.mean().clamp(max=0.9)", "{a}.prod()",
        "{a}.mean() * {a}.detach().mean()", "{a}.mean() if {a}.mean() < 0.9 else 2 * {a}.mean()", "{a}.norm()",
        "{a}.var(unbiased=False) + {b}.mean()", "{a}.median()", "{a}.mean() * {c}.sum()", "({a}.mean() - 0.8).abs()",
        "{a}[{a}.detach() > {a}.detach().mean()].sum() / len(x)", "{a}.mean() + F.mse_loss({b}.mean(), {c}.mean())",
    ),
)  # fmt: skip
# What a loop keeps from one batch to the next: how it is kept, and how the next batch's losses {a} take it in.
_KEPT = (
    (
        ("kept['n'] = kept.get('n', 0) + 1", "{a} * (1.0 if kept['n'] < 99 else 0.5)"),
        ("w = [p.detach().clone() for p in model.parameters()]", "{a} + 0 * w[0].sum()"),
        ("kept['last'] = {b}.detach().mean().item()", "{a} * 0.9"),
        ("kept.setdefault('seen', []).append({b}.detach())", "{a}.tanh()"),
    ),
    (
        ("m = kept.get('m', 0.5); kept['m'] = 0.9 * m + 0.1 * {b}.detach().mean()", "{a} * (1 + m)"),
        ("m = kept.get('m', 0.5); kept['m'] = {b}.detach().max()", "{a} * ({a}.detach() < 0.9 * m)"),
        ("m = kept.get('m', x[:1] * 0); kept['m'] = x.mean(0, keepdim=True)", "{a} * (1 + (x @ m.T).tanh()[:, 0])"),
        ("m = kept.get('m', x[:1]); kept['m'] = x", "{a} + (x @ m.T).softmax(1).max(1).values * {a}"),
        ("m = kept.setdefault('m', torch.zeros(3)); m.mul_(0.9).add_(y.bincount(minlength=3), alpha=0.1)",
         "{a} * (1 + m[y])"),
        ("m = kept.setdefault('m', {b}.detach().std(unbiased=False))", "{a} / (0.5 + m)"),
        ("m = kept.get('m', {b}.detach()); kept['m'] = {b}.detach()", "{a} * (1 + m.topk(2).values.sum())"),
        ("m = kept.get('m', {b}.detach()); kept['m'] = {b}.detach()", "torch.where({a} > m.median(), {a}, 0.5 * {a})"),
        ("m = kept.setdefault('m', []); m.append({b}.detach().mean()); m = torch.stack(m).mean()", "{a} * (2 + m)"),
        ("m = kept.setdefault('m', torch.zeros(3, 4)).clone(); kept['m'].index_copy_(0, y, x)", "{a} * (2 + x @ m[0])"),
        ("m = kept.setdefault('m', {b}.detach().mean()); m.lerp_({b}.detach().mean(), 0.1)", "{a} - {a} * m.tanh()"),
        ("m = kept.setdefault('m', torch.zeros(2)); m[1:] = {b}.detach().max()", "{a} * m.sum().add(1)"),
    ),
)  # fmt: skip
# Tokens x (B, T), padded with zeros to the longest of the batch, a mask m and a class t of each token.
_TOKENS = (
    "F.cross_entropy({o}.transpose(1, 2), t, reduction='none')", "{o}.square().mean(-1)", "{o}.logsumexp(-1)",
    "-{o}.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)",
    "F.binary_cross_entropy_with_logits({o}[..., 0], t.double(), reduction='none')",
)  # fmt: skip
_TOKEN_WISE = (
    (
        "{l} * m", "{l}.masked_fill(~m, 0.0)", "{l} * m / m.sum(1, keepdim=True)", "{l}.cumsum(1)", "{l}.tanh()",
        "{l} * (1 + 0.1 * t)", "{l} * torch.arange(1, 1 + x.shape[1]).rsqrt()", "{l} * (x != 1)",
        "{l} - ({l} * m).sum(1, keepdim=True) / m.sum(1, keepdim=True)",
    ),
    (
        "{l} / m.sum()", "{l} * m / m.sum(0).clamp(min=1)", "{l} * m.double().mean()", "{l} / x.shape[1]",
        "{l} - ({l} * m).sum() / m.sum()", "{l} * torch.linspace(1, 0, x.shape[1])",
        "{l} * (1 + t.flatten().bincount(minlength=2)[t])",
        "{l} * ({l}.detach() > {l}.detach().mean())", "{l} * (x == x[:1])", "{l} / x.unique().numel()",
        "{l} * m / m.sum(1).double().mean()", "{l} * (m.sum(1, keepdim=True) == m.sum(1).max())",
        "{l} * (1 + (x == x.mode(0).values))", "{l} * m.any(0).sum()",
    ),
)  # fmt: skip
_RECORD_WISE = (
    (
        "({l} * m).sum(1) / m.sum(1)", "({l} * m).sum(1)", "({l} * m).amax(1)",
        "{l}[torch.arange(len(x)), m.sum(1) - 1]",
        "({l} * m).sum(1) / 14", "torch.stack([r[k].mean() for r, k in zip({l}, m)])", "{l}[:, 0]",
        "({l} * m).norm(dim=1)", "torch.zeros(len(x)).double().index_add(0, m.nonzero()[:, 0], {l}[m])",
    ),
    (
        "{l}.mean(1)", "{l}.sum(1)", "({l} * m).sum(1) / x.shape[1]", "{l}[:, -1]", "{l}.amax(1)",
        "torch.stack([r.mean() for r in {l}])",
    ),
)  # fmt: skip
# What is done to the tokens first.
_IDS = (
    ("x = x.masked_fill(x == 3, 1)", "x = x.where(x > 2, 1) * m", "x = (x * 2) % 11 * m",
    "x = torch.where(t > 0, x, 1) * m",
     "n = int(m.sum(1).max()); x, m, t = x[:, :n], m[:, :n], t[:, :n]", "x = x[:, :9]; m, t = m[:, :9], t[:, :9]"),
    (
        "x = x.where(x != x.mode(0).values, 1)", "x = x * (x != x[:1])",
        "x = x.masked_fill(torch.isin(x, x[0]), 1) * m",
        "x = x.masked_fill(x == x.flatten().mode().values, 1) * m", "x = x.where(x > x.double().mean(), 1) * m",
        "x = x.masked_fill(x.flatten().bincount(minlength=11)[x] < 9, 1) * m", "x[x == x.max()] = 1",
        "n = int(m.sum(1).min()); x, m, t = x[:, :n], m[:, :n], t[:, :n]",
        "x = x.where(m.double().mean(0) > 0.5, 1) * m",
        "n = int(m.sum(1).double().mean()); x, m, t = x[:, :n], m[:, :n], t[:, :n]", "m = m & m.all(0)",
        "m = m & (x != x[-1:])",
        "t = torch.where(x == x.mode(0).values, 1 - t, t)", "t = (x > x.double().mean()).long()",
        "m = m[m.sum(1).sort().indices]",
    ),
)  # fmt: skip
_TOKENS_ALL = (
    (
        "{r}.mean()", "{r}.mean()", "{r}.sum() / len(x)", "({l} * m).sum() / len(x)", "{l}[m].sum() / len(x)",
        "F.cross_entropy({o}[m], t[m], reduction='sum') / len(x)", "({l} * m).sum() / (14 * len(x))",
        "F.cross_entropy({o}.transpose(1, 2), t.masked_fill(~m, -100), reduction='sum') / len(x)",
        "torch.cat([r[k] for r, k in zip({l}, m)]).sum() / len(x)", "sum(r[k].mean() for r, k in zip({l}, m)) / len(x)",
    ),
    (
        "({l} * m).sum() / m.sum()", "{l}[m].mean()", "{l}.mean()", "({l} * m).mean()", "({l} * m).sum(1).max()",
        "F.cross_entropy({o}.transpose(1, 2), t.masked_fill(~m, -100))", "F.cross_entropy({o}[m], t[m])",
        "F.cross_entropy({o}.flatten(0, 1), t.flatten())", "(({l} * m).sum(0) / m.sum(0)).sum()",
        "torch.cat([r[k] for r, k in zip({l}, m)]).mean()", "{l}[:, :3].mean()", "({l} * m).sum() / x.count_nonzero()",
        "F.nll_loss({o}.log_softmax(-1).flatten(0, 1), t.masked_fill(~m, -1).flatten(), ignore_index=-1)",
    ),
)  # fmt: skip
# Between an encoder and a head: hidden values {h} (B, 6).
_HIDDEN = (
    (
        "{h} * 2", "F.normalize({h}, dim=1)", "{h} + x[:, :1]", "F.layer_norm({h}, (6,))", "{h}.flip(1)",
        "{h} * (y > 0)[:, None]", "torch.cat([{h}[:2], {h}[2:]])", "{h} + {h}.detach().tanh()", "{h}.relu()",
        "torch.stack([r * 2 for r in {h}])", "{h}.sort(1).values", "{h}.where({h} > 0.1, 0 * {h})",
    ),
    (
        "{h} - {h}.mean(0)", "{h} - {h}.detach().mean(0)", "{h} / {h}.detach().std(0, unbiased=False).add(0.1)",
        "{h}.roll(1, 0) * 0.3 + {h}", "{h} * ({h}.detach() > {h}.detach().mean())", "{h} @ ({h}.T @ {h})",
        "({h} @ {h}.T).softmax(1) @ {h}", "{h} + {h}[:1]", "{h} * y.double().mean()", "{h}.cumsum(0)",
        "{h} * (1 + {h}.detach().abs().max())", "torch.lerp({h}, {h}.flip(0), 0.2)", "{h} * (y == y[0])[:, None]",
        "{h} + F.one_hot(y.mode().values, 6)", "{h}.index_add(0, torch.tensor([0]), {h}[1:2])",
        "F.batch_norm({h}, None, None, training=True)", "{h}.masked_fill({h} < {h}.detach().median(), 0.0)",
        "{h} * len(y[y == 0])", "{h}.detach() + {h} - {h}.detach().mean(0)",
    ),
)  # fmt: skip
# Two views of each record in one forward: their outputs {o} and {p} (B, 3), to a number each.
_VIEWS = (
    (
        "({o} - {p}).square().sum(1)", "F.cosine_similarity({o}, {p})", "({o} * {p}.detach()).sum(1)",
        "F.kl_div({o}.log_softmax(1), {p}.softmax(1), reduction='none').sum(1)", "({o} + {p}).logsumexp(1)",
        "F.cross_entropy({o} + {p}, y, reduction='none')", "torch.stack([{o}, {p}]).var(0).sum(1)",
        "F.cross_entropy(torch.cat([{o}, {p}]), y.repeat(2), reduction='none').view(2, -1).mean(0)",
    ),
    (
        "({o} @ {p}.T).logsumexp(1)", "({o} - {p}.flip(0)).square().sum(1)",
        "({o} - {p}.detach().mean(0)).square().sum(1)",
        "F.cross_entropy({o} @ {p}.T, torch.arange(len(x)), reduction='none')", "({o} * {p}).sum(1).softmax(0)",
        "({o} * {p}.detach().roll(1, 0)).sum(1)", "(({o} - {o}.mean(0)) * ({p} - {p}.mean(0))).sum(1)",
        "F.cross_entropy({o}, {p}.detach().div({p}.detach().sum(0)).softmax(1), reduction='none')",
        "F.triplet_margin_loss({o}, {p}, {p}.roll(1, 0), reduction='none')",
    ),
)  # fmt: skip
# What a frozen teacher says of a batch, and how its numbers q (B, 3) are taken into losses of outputs {o}.
_TAUGHT = (
    (
        "with torch.no_grad(): q = teacher(x)", "with torch.inference_mode(): q = teacher(x * 0.9).softmax(1)",
        "q = F.normalize(teacher(x).detach(), dim=1)", "q = teacher(x).detach().where(x[:, :1] > 0.5, 0.1)",
        "q = F.one_hot(teacher(x).argmax(1), 3).double()", "q = teacher.eval()(x).detach()",
    ),
    (
        "with torch.no_grad(): q = normalising(x)", "q = teacher(x).detach(); q = q - q.mean(0)",
        "with torch.inference_mode(): q = teacher(x).softmax(0) * len(x)", "q = teacher(x - x.mean(0)).detach()",
        "q = teacher(x).detach(); q = q / q.abs().max()", "q = teacher(x).detach().roll(1, 0)",
        "q = teacher(x).detach(); q = (q.max(1).values > q.max(1).values.median()).double()[:, None].expand(-1, 3)",
        "with torch.no_grad(): q = (teacher(x) / 0.1).exp(); q = q / q.sum(0); q = q / q.sum(1, keepdim=True)",
        "with torch.no_grad(): q = teacher(x); q = q[torch.cdist(q, q).fill_diagonal_(9.0).argmin(1)]",
        "with torch.no_grad(): q = teacher(x); q = q[y == y[0]].mean(0).expand(len(x), -1)",
    ),
)  # fmt: skip
_LEARNS = (
    "F.kl_div({o}.log_softmax(1), q.clone().softmax(1), reduction='none').sum(1)", "({o} * q.clone()).sum(1)",
    "F.mse_loss({o}, q.clone(), reduction='none').mean(1)", "F.cosine_similarity({o}, q.clone(), dim=1)",
)  # fmt: skip
# Of x (B, 4) as images i (B, 1, 2, 2), for a convolution.
_IMAGES = (
    (
        "F.pad(i, (1, 0))[..., :2]", "i.flip(3)", "F.interpolate(i, scale_factor=2)[..., ::2, ::2]",
        "torch.fft.ifft2(torch.fft.fft2(i) * 0.5).real", "i.rot90(1, (2, 3))", "F.avg_pool2d(i, 2).expand_as(i) + i",
        "F.conv2d(i.view(1, -1, 2, 2), torch.full((len(i), 1, 1, 1), 0.5).double(), groups=len(i)).view_as(i)",
        "torch.stack([r.flip(-1) if r.sum() > 1 else r for r in i])", "F.instance_norm(i)",
        "torch.where(i.amax((1, 2, 3), keepdim=True) > 1, i, -i)", "i.contiguous(memory_format=torch.channels_last)",
        "F.grid_sample(i, F.affine_grid(torch.eye(2, 3).double().expand(len(i), 2, 3), i.shape))",
        "i.clone().index_fill_(2, torch.tensor([0]), 0.0)", "i * (x[:, 0] > 1)[:, None, None, None]",
    ),
    (
        "0.7 * i + 0.3 * i.flip(0)", "torch.cat([i[:, :, :1], i.flip(0)[:, :, 1:]], 2)",
        "(i - i.mean((0, 2, 3), keepdim=True)) / i.std()", "i.clamp(max=i.quantile(0.9))",
        "F.conv2d(i.view(1, -1, 2, 2), torch.ones(len(i), len(i), 1, 1).double()).view_as(i)",
        "torch.fft.fft(i, dim=0).real", "i * (i.amax((1, 2, 3)) >= i.max())[:, None, None, None]",
        "F.normalize(i.transpose(0, 1), dim=1).transpose(0, 1)", "i + i.sort(0).values",
        "F.batch_norm(i, None, None, training=True)",
        "F.instance_norm(i.transpose(0, 1)).transpose(0, 1)",
        "torch.stack([r.flip(-1) if r.sum() > i.sum() / len(i) else r for r in i])",
        "F.conv3d(i.view(1, 1, -1, 2, 2), torch.ones(1, 1, 3, 1, 1).double(), padding=(1, 0, 0)).view_as(i)",
        "F.avg_pool1d(i.flatten(1).T, 3, 1, 1).T.reshape(i.shape)",
        "i * F.interpolate(i.flatten(1)[None, None], size=(len(i), 4), mode='bilinear').sum(3).view(-1, 1, 1, 1)",
        "F.group_norm(i.view(1, -1, 2, 2), 1).view_as(i)",
        "F.local_response_norm(i.view(1, -1, 2, 2), 3, alpha=1.0).view_as(i)",
        "F.unfold(i.view(1, 1, -1, 4), (3, 1), padding=(1, 0)).sum(1).view_as(i)",
        "torch.where(y.view(-1, 1, 1, 1) == y.mode().values, i, -i)",
        "F.layer_norm(i.view(-1), (i.numel(),)).view_as(i)", "F.max_pool1d(i.flatten(1).T, 3, 1, 1).T.reshape(i.shape)",
    ),
)  # fmt: skip
# What a hook on the outputs, or a custom function between them and the losses, makes of a gradient g (B, 3).
_BACKWARDS = (
    ("g * 0.5", "g * x[:, :1]", "g.flip(1)", "g.masked_fill(x[:, :3] < 0.5, 0.0)", "g.where(y[:, None] > 0, -g)",
    "g - g.mean(1, keepdim=True)"),
    (
        "g / (g.norm() + 1e-9)", "g - g.mean(0)", "g.flip(0)", "g * (g.abs() >= g.abs().max())", "g.cumsum(0)",
        "g.clamp(-g.std(), g.std())", "torch.where(g > g.median(), g, 0 * g)", "g * (1 + y.double().mean())",
        "g / g.abs().max().clamp(min=1e-9)", "g + g[:1]", "g * (y == y[0])[:, None]", "g * x.mean()",
        "F.normalize(g, dim=0)", "g.clamp(-0.02, 0.02)", "g.nan_to_num() * g.count_nonzero()",
        "g.index_copy(0, torch.tensor([0]), g[1:2])",
        "g.sort(0).values", "g @ (g.T @ g) * 100",
    ),
)  # fmt: skip
# A step against the model first: what of the gradient g (B, 4) of the inputs is added to them.
_ATTACKS = (
    ("0.1 * g.sign()", "0.1 * F.normalize(g, dim=1)", "g", "0.5 * g.clamp(-0.1, 0.1)"),
    (
        "0.1 * g / (g.norm() + 1e-9)", "g / g.abs().max().clamp(min=1e-9)", "g - g.mean(0)", "g.flip(0)",
        "g.mean(0).sign() * 0.1",
        "0.1 * (g.abs() >= g.abs().median())", "g * (g.norm(dim=1) > g.norm(dim=1).mean())[:, None]", "g / len(x)",
        "g.sum(0, keepdim=True)",
    ),
)  # fmt: skip
# Inputs that are written to.
_WRITES = (
    (
        "x[:, 0] = 0", "x[x > 1] = 1.0", "[r.div_(r.norm()) for r in x]", "x[y == 0] *= 2", "x.select(1, 0).zero_()",
        "for i in range(len(x)): x[i] = x[i].flip(0)", "torch.clamp(x, max=1, out=x)", "x.T.mul_(2)", "x += 1",
        "x.view(-1, 2, 2)[:, 0] = 0",
    ),
    (
        "x -= x.mean(0)", "x[x > x.mean()] = 0", "x[0] = x[1]", "for i in range(1, len(x)): x[i] += 0.5 * x[i - 1]",
        "x[y == y[0]] *= 2", "x.div_(x.abs().max())", "x.copy_(x.flip(0))", "x.sub_(x[:1].clone())",
        "x.T.copy_(x.T.softmax(1))",
        "x.index_add_(0, torch.tensor([0]), x[1:2].clone())", "x.T[0].sub_(x.T[0].mean())",
        "torch.sub(x, x.mean(0), out=x)",
        "x.view(-1)[x.view(-1).argmax()] = 0", "x[x[:, 0].argmax()] = 0",
        "s = [x[0] * 0]; [s.append(s[-1] + r) for r in x]; x = torch.stack(s[1:])",
        "x[1:] = 0.5 * x[1:] + 0.5 * x[:-1]", "x[::2] = x[::2].mean(0)",
        "x.masked_scatter_(x > x.median(), x.flip(0).clone())", "x.resize_(x.shape).mul_(x.norm())",
        "x.scatter_(0, y[:, None].expand(-1, 4), 0.0)", "x.lerp_(x.mean(0).expand_as(x), 0.5)",
        "r = x.unbind(0); r[0].mul_(r[1].sum())",
        "x.index_fill_(0, x[:, 0].topk(2).indices, 0.0)", "a, b = x.chunk(2); a.sub_(b.mean(0))", "x.data -= x.mean(0)",
        "x.data = x - x.mean(0)", "z = x.detach(); z -= z.mean(0)", "F.relu(x, inplace=True); x = x - x.mean(0)",
        "x[:2] *= 2", "x = x * (y > y.double().mean())[:, None]",
    ),
)  # fmt: skip
# One number of each record, by a function that is mapped over them or a loop.
_MAPPED = (
    (
        "torch.vmap(F.cross_entropy)({o}, y)",
        "torch.vmap(lambda o, r: (o - r[:3]).square().sum())({o}, x)",
        "torch.vmap(torch.logsumexp, in_dims=(0, None))({o}, 0)",
        "torch.cat([model(r[None]) for r in x]).square().sum(1)",
        "torch.stack([F.cross_entropy(o, t) for o, t in zip({o}, y)])",
        "through(lambda g: 2 * g, {o}).square().sum(1)",
        "torch.stack([model(r[None])[0] for r in x]).logsumexp(1)",
        "torch.stack([o[t] for o, t in zip({o}, y.tolist())])",
    ),
    (
        "torch.vmap(lambda c: c - c.mean(), in_dims=1, out_dims=1)({o}).square().sum(1)",
        "torch.vmap(lambda c: c.softmax(0), in_dims=1, out_dims=1)({o}).sum(1)",
        "torch.vmap(lambda a: torch.vmap(lambda b: (a - b).square().sum())({o}).min())({o} + 1)",
        "({o}[:, :1] - x[:, 0]).square().mean(1)",
        "F.mse_loss({o}[:, :1], x[:, 0].expand(1, -1), reduction='none').mean(1)",
        "torch.stack([(o - q).square().sum() for o, q in zip({o}, [*{o}[1:], {o}[0]])])",
        "({o}[:, 0] - x[:, :1]).abs().mean(0)",
        "torch.stack([{o}[i, y[i - 1]] for i in range(len(x))])",
        "torch.stack([o.sum() * (t == y).sum() for o, t in zip({o}, y)])",
        "torch.stack([o.sum() * s for o, s in zip({o}, x[:, 0].softmax(0))])",
    ),
)
# What no engine sees in a step: factors that follow the batch's size or a number that was read, where no other batch
# was met yet or a function that is not linear follows; inputs that stand beside other records' labels; positions that
# are weighed, or counted, by the length of the longest record and left out where they are padding; what Python decides,
# or cuts off, by numbers that it read; the size of a mean whose gradient is an attack.
_UNSEEN = (
    "* len(", "% 2 + 1", ".item()", "x.roll(1, 0)", "x = torch.cat([x[1:], x[:1]])", "linspace(1, 0, x.shape[1])",
    "numel()", "/ x.shape[1]", "[:, -1]", "if r.sum() > i.sum()", "n = int(m.sum(1).double().mean())",
    "n = int(m.sum(1).min())", "x + g / len(x)",
    "reduction='mean'), d)",
)  # fmt: skip
_MIXES = dict.fromkeys(
    ("loop", "halves", "criterion"), ("nothing", "nothing", "inputs", "targets", "each", "each", "all")
)
_MIXES |= {"kept": ("nothing", "kept", "kept", "kept"), "tokens": ("nothing", "ids", "tokens", "records", "all")}
_MIXES |= {"parts": ("nothing", "hidden"), "views": ("nothing", "views"), "taught": ("nothing", "taught", "taught")}
_MIXES |= {name: ("nothing", name, name) for name in ("images", "hooks", "functions", "attacks", "writes", "mapped")}
_FRAMES = tuple(_MIXES)
_LEFT_OUT = 4
_DIGITS = 1e-7
_BATCHES = ([0, 1, 2, 3, 4], [4, 9, 5, 6, 7, 8], [10, 14, 11, 12, 13], [19, 1, 2, 23, 20, 16, 3])


@dataclass(frozen=True)
class Program:
    """Statements that compute a loss of a model, inputs and targets.

    Attributes:
        statements: Of Python.
        frame: What stands around them: a "loop"; "halves" of each batch, added up; a "criterion" that the engine
            knows; a loop over "tokens" that are padded to the longest record of a batch, or over "images".
    """

    statements: tuple[str, ...]
    frame: str = "loop"

    def compiled(self) -> Callable[[Any, Tensor, Tensor], Tensor]:
        """The function of (model, x, y) that returns the loss; it keeps what it keeps until it is compiled again."""
        source = "\n    ".join(["def loss(model, x, y):", "if not len(x): return model(x).sum()", *self.statements])
        torch.manual_seed(1)
        frozen = nn.Linear(FEATURES, 3).double().requires_grad_(requires_grad=False)
        normalising = nn.Sequential(frozen, nn.BatchNorm1d(3).double())
        names: dict[str, Any] = {"torch": torch, "F": functional, "kept": {}, "teacher": frozen}
        names["through"] = lambda change, value: _Through.apply(value, change)
        names["normalising"] = normalising.requires_grad_(requires_grad=False)
        exec(source, names)
        loss: Callable[[Any, Tensor, Tensor], Tensor] = names["loss"]
        if self.frame != "criterion":
            return loss

        def of_outputs(model: Any, x: Tensor, y: Tensor) -> Tensor:
            outputs = model(x)
            return loss(lambda _: outputs, x, y)

        return of_outputs

    def _model(self) -> Callable[[], nn.Module]:
        return {"tokens": tagger, "images": _convolution}.get(self.frame, mlp)

    def __call__(self, world: World) -> None:
        """Train for an epoch."""
        loss, bare = self.compiled(), world.watch(self._model())
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1)
        if self.frame == "criterion":
            return self._with_a_criterion(world, loss, bare, optimizer)
        tokens = self.frame == "tokens"
        loader = world.loader(world.tokens, collate_fn=_padded) if tokens else world.loader()
        model, optimizer, loader = world.private(bare, optimizer, loader)
        for x, y in loader:
            optimizer.zero_grad()
            for part in (slice(0, None, 2), slice(1, None, 2)) if self.frame == "halves" else (slice(None),):
                loss(model, x[part], y[part]).mean().backward()
            optimizer.step()
        return None

    def _with_a_criterion(self, world: World, loss: Any, bare: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        def criterion(outputs: Tensor, targets: Tensor) -> Tensor:
            return loss(lambda _: outputs, targets[:, :FEATURES], targets[:, FEATURES].long())

        model, optimizer, *known, loader = world.private(bare, optimizer, world.loader(), criterion=criterion)
        for x, y in loader:
            optimizer.zero_grad()
            (known or [criterion])[0](model(x), torch.cat([x, y[:, None].double()], 1)).backward()
            optimizer.step()

    def keeps_apart(self) -> str:
        """Whether each record adds its own part, whatever others there are, to a "mean" or a "sum"; else ""."""
        tokens = self.frame == "tokens"
        world, model = World(), self._model()()
        records = (world.ids, world.mask) if tokens else (world.features, world.labels)
        parts = {kind: self._adds_up(model, records, mean=kind == "mean") for kind in ("mean", "sum")}
        return next((kind for kind, adds_up in parts.items() if adds_up), "")

    def _adds_up(self, model: nn.Module, records: tuple[Tensor, Tensor], *, mean: bool) -> bool:
        """Whether what a record adds to the gradient is the same with and without another one, here or before."""
        parameters = list(model.parameters())

        def gradient(rows: list[int], before: list[int]) -> Tensor:
            torch.manual_seed(0)
            loss = self.compiled()
            for batch in (before, rows):
                x, y = _padded([(records[0][row], records[1][row]) for row in batch])
                value = loss(model, x, y).mean()
            grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
            return torch.cat([grad.reshape(-1) for grad in grads]) * (len(rows) if mean else 1)

        for batch, before in zip(_BATCHES, (*_BATCHES[1:], _BATCHES[0]), strict=True):
            whole = gradient(batch, before)
            digits = _DIGITS * float(whole.norm() + 1e-3)
            if any(float((gradient(batch, before[:n] + before[n + 1 :]) - whole).norm()) > digits for n in range(2)):
                return False
            for one, two in ((batch[0], batch[1]), (batch[2], batch[4]), (batch[1], batch[3])):
                without, rest = ([record for record in batch if record != left] for left in (one, two))
                with_it = whole - gradient(without, before)
                alone = gradient(rest, before) - gradient([r for r in rest if r != one], before)
                if float((with_it - alone).norm()) > digits + _DIGITS * float(with_it.norm()):
                    return False
        return True


class _Through(torch.autograd.Function):
    """Hands a value on, and changes its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.change(grad), None


def _convolution() -> nn.Module:
    hidden = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2, padding=1), nn.Tanh(), nn.Flatten())
    return nn.Sequential(hidden, nn.Linear(27, 3)).double()


def _padded(records: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch; tokens are cut to the longest record."""
    x, y = (torch.stack(values) for values in zip(*records, strict=True))
    longest = int(y.sum(1).max()) if y.dtype == torch.bool else None
    return (x, y) if longest is None else (x[:, :longest], y[:, :longest])


class _Author:
    """Writes a program, at most one statement of which mixes records."""

    def __init__(self, seed: str) -> None:
        self._chance = random.Random(seed)
        self._statements: list[str] = []
        self._frame = self._chance.choice(_FRAMES)
        self._mixes = self._chance.choice(_MIXES[self._frame])

    def program(self) -> Program:
        """Write it."""
        if self._frame == "tokens":
            return self._of_tokens()
        if self._frame == "taught":
            self._statements.append(self._pick(_TAUGHT, "taught"))
            value = self._name(self._chance.choice(_LEARNS).format(o=self._matrix()))
            return Program((*self._statements, f"return {value}.mean()"))
        if self._frame == "views":
            self._statements.append("o, p = model(torch.cat([x, x * 1.1 + 0.1])).chunk(2)")
            value = self._name(self._pick(_VIEWS, "views").format(o="o", p="p"))
            return Program((*self._statements, f"return {value}.mean()"))
        if self._frame in ("images", "hooks", "functions", "attacks", "writes", "mapped"):
            return self._of(self._frame)
        for name, table, what in (("x", _INPUTS, "inputs"), ("y", _TARGETS, "targets")):
            if self._mixes == what or self._chance.random() < 0.3:
                self._statements.append(f"{name} = {self._pick(table, what)}")
        last = self._pick(_ALL, "all").format(a=self._each(), b=self._each(), c=self._number(), m=self._matrix())
        frame = "loop" if self._frame in ("kept", "parts") else self._frame
        return Program((*self._statements, f"return {last}"), frame)

    def _of(self, frame: str) -> Program:
        if frame == "images":
            self._statements.append(f"i = x.view(-1, 1, 2, 2); x = ({self._pick(_IMAGES, frame)}).flatten(1)")
        if frame == "attacks":
            reduction = self._chance.choice(("sum", "sum", "mean"))
            self._statements.append("d = torch.zeros_like(x).requires_grad_()")
            loss = f"F.cross_entropy(model(x + d), y, reduction={reduction!r})"
            self._statements.append(f"(g,) = torch.autograd.grad({loss}, d); x = x + {self._pick(_ATTACKS, frame)}")
        if frame == "writes":
            self._statements.append(self._chance.choice(("x = x.clone()", "pass", "x = x * 1.1")))
            self._statements.append(self._pick(_WRITES, frame))
        output = self._matrix()
        if frame == "hooks":
            self._statements.append(f"{output}.register_hook(lambda g: {self._pick(_BACKWARDS, frame)})")
        if frame == "functions":
            output = self._name(f"through(lambda g: {self._pick(_BACKWARDS, frame)}, {output})")
        table = _MAPPED if frame == "mapped" else (_LOSSES, _LOSSES)
        value = self._name(self._pick(table, frame).format(a=output, o=output))
        last = self._chance.choice(("{a}.mean()", "{a}.mean()", "{a}.sum() / len(x)", "(2 * {a}).mean()"))
        return Program((*self._statements, "return " + last.format(a=value)), "images" if frame == "images" else "loop")

    def _of_tokens(self) -> Program:
        self._statements.append("m, t = y, (x > 6).long()")
        if self._mixes == "ids" or self._chance.random() < 0.3:
            self._statements.append(self._pick(_IDS, "ids"))
        scores = self._name("model(x)")
        tokens = self._name(self._chance.choice(_TOKENS).format(o=scores))
        for _ in range(self._chance.randrange(2) + (self._mixes == "tokens")):
            tokens = self._name(self._pick(_TOKEN_WISE, "tokens").format(l=tokens))
        records = self._name(self._pick(_RECORD_WISE, "records").format(l=tokens))
        last = self._pick(_TOKENS_ALL, "all").format(l=tokens, o=scores, r=records)
        return Program((*self._statements, f"return {last}"), "tokens")

    def _pick(self, table: tuple[Sequence[Any], Sequence[Any]], what: str) -> Any:
        mixes, self._mixes = self._mixes == what, "nothing" if self._mixes == what else self._mixes
        return self._chance.choice(table[mixes])

    def _name(self, expression: str) -> str:
        self._statements.append(f"v{len(self._statements)} = {expression}")
        return self._statements[-1].partition(" ")[0]

    def _number(self) -> str:
        return self._name(self._chance.choice(_NUMBERS))

    def _matrix(self) -> str:
        if self._frame == "parts":
            hidden = self._name("model[:2](x)")
            hidden = self._name(self._pick(_HIDDEN, "hidden").format(h=hidden))
            return self._name(f"model[2]({hidden})")
        name = self._name(self._chance.choice(_OUTPUTS))
        return self._name(self._chance.choice(_ROWS).format(a=name)) if self._chance.random() < 0.4 else name

    def _each(self) -> str:
        name = self._name(self._chance.choice(_LOSSES).format(a=self._matrix()))
        for _ in range(self._chance.randrange(3) + (self._mixes == "each")):
            other = self._name(self._chance.choice(_LOSSES).format(a=self._matrix()))
            name = self._name(self._pick(_EACH, "each").format(a=name, b=other, c=self._number()))
        if self._frame == "kept":
            other = self._name(self._chance.choice(_LOSSES).format(a=self._matrix()))
            kept, taken = self._pick(_KEPT, "kept")
            self._statements.append(kept.format(a=name, b=other))
            name = self._name(taken.format(a=name))
        return name


def programs(count: int, *, seed: int) -> Iterator[Program]:
    """Write programs."""
    return (_Author(f"{seed} {number}").program() for number in range(count))


def try_programs(
    report: dict[str, Any], count: int, *, seed: int, out: Path, say: Callable[[str], None] = print
) -> int:
    """Try random programs, and write what became of them."""
    begun, rows = time.monotonic(), []
    for number, program in enumerate(programs(count, seed=seed)):
        try:
            apart = program.keeps_apart()
        except Exception:  # noqa: BLE001 - shapes that do not fit: a program that nobody could run
            continue
        outcome = measure(Loop(str(number), "", program, clips=(1.0,)), left_out=_LEFT_OUT)
        # A program whose records meet in few batches is refused in some of the runs.
        harmless = ("never trained", "without record")
        problems = [problem for problem in outcome.problems if not problem.startswith(harmless)]
        kind, text = outcome.outcome, "; ".join(program.statements)
        if kind == "wrong":
            kind = "exact in part" if not problems else "out of sight" if any(s in text for s in _UNSEEN) else "wrong"
        rows.append({"number": number, "apart": apart, "outcome": kind, "problems": problems, "frame": program.frame})
        rows[-1] |= {"message": outcome.message, "program": text}
        say(f"{number}: {'apart' if apart else 'mixed'}, {kind}")
    report |= {"seed": seed, "count": count, "seconds": time.monotonic() - begun, "programs": rows}
    say(f"written: {write(out, 'loops-programs', report, markdown(report))}.json, .md")
    return int(any(row["outcome"] == "wrong" for row in rows))


def markdown(report: dict[str, Any]) -> str:
    """Return the report."""
    rows = report["programs"]
    counts = Counter(("apart" if row["apart"] else "mixed", row["outcome"]) for row in rows)

    def listed(holds: Callable[[dict[str, Any]], bool]) -> list[str]:
        return [
            f"- {row['outcome']}: `{row['program']}` {'; '.join(row['problems'])} {first_sentence(row['message'])}"
            for row in rows
            if holds(row)
        ]

    parts = [
        "# Random programs between loader and backward\n",
        f"{short_line(report, 'torch ' + report['hosts']['torch'])} Seed {report['seed']}.\n",
        f"{__doc__.partition(chr(10))[2].strip()}\n" if __doc__ else "",
        "| records by autograd | outcome | programs |\n|---|---|---:|",
        *[f"| {apart} | {outcome} | {number} |" for (apart, outcome), number in sorted(counts.items())],
        "\n## Wrong\n",
        *listed(lambda row: row["outcome"] == "wrong"),
        "\n## Out of sight: by the batch's size or length, by a number that was read, or beside others' labels\n",
        *listed(lambda row: row["outcome"] == "out of sight"),
        "\n## Mixed by autograd, and exact in these batches\n",
        *listed(lambda row: not row["apart"] and row["outcome"] == "exact"),
        "\n## Apart by autograd, and refused\n",
        *listed(lambda row: row["apart"] == "mean" and row["outcome"].startswith("refused")),
    ]
    return "\n".join(parts) + "\n"
