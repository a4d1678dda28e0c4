"""More cases of the zoo: idioms that people write by hand, and models of peft and diffusers where they are installed."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import zoo_models
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from zoo_models import Model, generator

Tensor = torch.Tensor
WIDTH = 8


class Net(nn.Module):
    """`function(self, x)` is its forward; `parts` become its modules, parameters and attributes."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            self.register_buffer(name, part) if type(part) is Tensor else setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def rows(n: int, seed: int) -> dict[str, Tensor]:
    x = torch.randn(3 * n, WIDTH, generator=generator(seed)).double()
    return {"x": x, "y": torch.randint(0, 3, (3 * n,), generator=generator(seed + 1))}


def pictures(n: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 3, 12, 12, generator=generator(seed)).double(), "y": torch.randint(0, 3, (n,), generator=generator(seed + 1))}


def waves(n: int, seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, 64, generator=generator(seed)).double()}


def classes(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def without(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = layer(x)
    return y.clone()


def lin(out: int = WIDTH) -> nn.Linear:
    return nn.Linear(WIDTH, out)


class Quantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def parametrized(kind: str) -> nn.Module:
    from torch.nn.utils import parametrizations, parametrize

    layer = lin()
    if kind == "symmetric":
        parametrize.register_parametrization(layer, "weight", Symmetric())
    else:
        getattr(parametrizations, kind)(layer)
    return nn.Sequential(layer, nn.Tanh(), lin(3))


def spectrum(self: Any, x: Tensor) -> Tensor:
    waves = torch.fft.rfft2(x)
    out = torch.zeros_like(waves)
    out[:, :, :4, :4] = torch.einsum("bixy,ioxy->boxy", waves[:, :, :4, :4], torch.view_as_complex(self.weight))
    return self.head(torch.fft.irfft2(out, s=x.shape[-2:]).mean((2, 3)))


def codebook(self: Any, x: Tensor) -> Tensor:
    z = self.first(x)
    chosen = F.one_hot(torch.cdist(z, self.code).argmin(1), 6).to(z.dtype)
    quantized = chosen @ self.code
    with torch.no_grad():
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.code.lerp_((chosen.t() @ z) / (chosen.sum(0)[:, None] + 1e-3), 0.1)
    return self.head(z + (quantized - z).detach()) + F.mse_loss(quantized.detach(), z)


def neighbours(self: Any, x: Tensor) -> Tensor:
    n = len(x)
    source, target = torch.arange(2 * n) % n, (3 * torch.arange(2 * n) + 1) % n
    z = self.first(x)
    score = F.leaky_relu(z[source].sum(1) - z[target].mean(1), 0.2)
    largest = torch.full((n,), -1e9, dtype=z.dtype).scatter_reduce(0, target, score, "amax")
    part = (score - largest[target].detach()).exp()
    total = torch.zeros(n, dtype=z.dtype).index_add(0, target, part)
    return self.head(torch.zeros_like(z).index_add(0, target, z[source] * (part / total[target])[:, None]))


def tokens_for_experts(self: Any, x: Tensor) -> Tensor:
    weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
    out = torch.zeros_like(x)
    for i, expert in enumerate(self.experts):
        row, k = torch.where(chosen == i)
        out.index_add_(0, row, expert(x[row]) * weights[row, k, None])
    return self.head(out)


def midpoints(self: Any, x: Tensor) -> Tensor:
    def change(t: float, y: Tensor) -> Tensor:
        return self.first(y).tanh() * (1 - t)

    h = 0.25
    for i in range(4):
        x = x + h * change((i + 0.5) * h, x + h / 2 * change(i * h, x))
    return self.head(x)


def solves(self: Any, x: Tensor) -> Tensor:
    s = self.weight @ self.weight.t() + torch.eye(WIDTH, dtype=x.dtype)
    y = torch.cholesky_solve(self.first(x).t(), torch.linalg.cholesky(s)).t()
    return self.head(y) + torch.logdet(s) + torch.linalg.eigvalsh(s).sum() + torch.matrix_exp(0.1 * self.weight).trace()


def averages(self: Any, x: Tensor) -> Tensor:
    self.mean = (0.9 * self.mean + 0.1 * x.mean(0)).detach()
    return self.head(self.first(x) - self.mean)


def turned(self: Any, x: Tensor) -> Tensor:
    grid = F.affine_grid(self.turn.expand(len(x), 2, 3), x.shape, align_corners=False)
    return self.head(F.grid_sample(x, grid, align_corners=False).mean((2, 3)))


def heard_twice(self: Any, x: Tensor) -> Tensor:
    return self.out(self.first(x[:, None]).tanh())[:, 0]


def both(self: Any, x: Tensor) -> Tensor:
    return self.head(torch.einsum("bi,ij,bj->bj", x, self.w, self.first(x))) + self.b(x, x)


def ensemble(self: Any, x: Tensor) -> Tensor:
    from torch.func import functional_call, vmap

    states = [dict(m.named_parameters()) for m in self.several]
    mine = {name: torch.stack([state[name] for state in states]) for name in states[0]}
    return vmap(lambda p: functional_call(self.several[0], p, (x,)))(mine).mean(0)


class Reversed(torch.autograd.Function):
    """Keeps no activation: backward runs the layers again, and leaves their gradients in `grad`."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, two: Tensor, f: nn.Module, g: nn.Module) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            one = one + f(two)
            two = two + g(one)
        ctx.save_for_backward(one, two)
        ctx.layers = f, g
        return one, two

    @staticmethod
    def backward(ctx: Any, d_one: Tensor, d_two: Tensor) -> Any:
        (one, two), (f, g) = ctx.saved_tensors, ctx.layers
        with torch.enable_grad():
            one = one.detach().requires_grad_()
            change = g(one)
            change.backward(d_two)
            d_one = d_one + one.grad
            two = (two - change).detach().requires_grad_()
            torch.autograd.backward(f(two), d_one)
        return d_one, d_two + two.grad, None, None


class Turned(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        return x.view_as(x), x > 0

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        return -ctx.scale * gradient, None


def turned_back(self: Any, x: Tensor) -> Tensor:
    y, positive = Turned.apply(self.first(x), 0.3)
    return self.head(torch.where(positive, y, 0.1 * y))


def noisy_the_same(self: Any, x: Tensor) -> Tensor:
    own = torch.Generator().manual_seed(0)
    return self.head(self.first(x + 0.1 * torch.randn(x.shape, generator=own, dtype=x.dtype))[:, torch.randperm(WIDTH, generator=own)])


def queued(self: Any, x: Tensor) -> Tensor:
    key, query = (F.normalize(layer(x), dim=-1) for layer in (self.other, self.first))
    near = query @ self.queue.clone().t()
    self.queue = torch.cat([key.detach(), self.queue])[:12]
    return self.head(query) + near[:, :3]


def collected(self: Any, x: Tensor) -> Tensor:
    seen: list[Tensor] = []
    hook = self.first.register_forward_hook(lambda module, args, result: seen.append(result))
    y = self.first(x)
    hook.remove()
    y.register_hook(lambda gradient: 0.5 * gradient)
    return self.head(y) + seen[0].mean()


def curved(self: Any, x: Tensor) -> Tensor:
    from torch.func import hessian, vmap

    second = hessian(lambda row: self.first(row).tanh().sum())
    return self.head(self.first(x) + vmap(lambda row: second(row).diagonal())(x))


def counted_by_value(self: Any, x: Tensor) -> Tensor:
    y = self.head(self.first(x)) * (1.0 if int(self.at) < 2 else 0.5)
    self.at = self.at + 1
    return y


def cut_by_value(self: Any, x: Tensor) -> Tensor:
    y = checkpoint(lambda z: self.first(z).tanh(), x, use_reentrant=False)
    return self.head(y / y.norm().detach() if y.norm().item() > 1 else y)


def seeded(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return self.head(self.first(x) + 0.1 * torch.randn_like(x))


def packed(self: Any, x: Tensor) -> Tensor:
    lengths = (x[:, 0] > 0).long() + 1
    rows = nn.utils.rnn.pack_padded_sequence(x.view(len(x), 2, 4), lengths, batch_first=True, enforce_sorted=False)
    return self.head(self.rnn(rows)[1][-1])


def told_apart(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Two losses of one step; the second trains the first module alone."""
    made = model.first(batch["x"])
    judge = lambda x: model.head(x)[:, 0]  # noqa: E731
    judged = F.softplus(-judge(batch["x"])).mean() + F.softplus(judge(made.detach())).mean()
    model.head.requires_grad_(False)
    fooled = F.softplus(-judge(made)).mean()
    model.head.requires_grad_(True)
    return judged + fooled


def per_sample(model: Any, batch: dict[str, Tensor]) -> Tensor:
    from torch.func import functional_call, grad, vmap

    inside = model.first(batch["x"]).tanh()
    one = lambda p, x, y: F.cross_entropy(functional_call(model.head, p, (x[None],)), y[None])  # noqa: E731
    each = vmap(grad(one), (None, 0, 0))(dict(model.head.named_parameters()), inside, batch["y"])
    return F.cross_entropy(model.head(inside), batch["y"]) + sum(g.square().mean() for g in each.values())


def solved(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """A differential equation's residual."""
    x = batch["x"].clone().requires_grad_()
    u = model(x)[:, 0]
    (du,) = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)
    (ddu,) = torch.autograd.grad(du[:, 0], x, torch.ones_like(u), create_graph=True)
    return (ddu[:, 0] + u - x[:, 1]).square().mean()


def lengths(n: int, seed: int) -> dict[str, Any]:
    """Another length at each step, a mask at every second, a number beside."""
    step = seed // 10
    x = torch.randn(3 * n, 2 + step % 2, WIDTH, generator=generator(seed)).double()
    return {**rows(n, seed), "x": x, "mask": x[..., 0] > 0 if step % 2 else None, "weight": 1 + 0.1 * step}


def of_lengths(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    x = batch["x"] if batch["mask"] is None else batch["x"] * batch["mask"][..., None]
    return F.cross_entropy(model(x).mean(1), batch["y"]) * batch["weight"]


def penalized(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = batch["x"].clone().requires_grad_()
    y = model(x)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return F.cross_entropy(y, batch["y"]) + (gradient.norm(2, dim=1) - 1).square().mean()


def adapted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One step of an inner optimization, differentiated through."""
    from torch.func import functional_call, grad

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, parameters, (x,)), y)

    parameters = dict(model.named_parameters())
    half = len(batch["x"]) // 2
    step = grad(loss)(parameters, batch["x"][:half], batch["y"][:half])
    return loss({n: p - 0.1 * step[n] for n, p in parameters.items()}, batch["x"][half:], batch["y"][half:])


def contrasted(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    a, b = F.normalize(model(batch["x"]), dim=-1), F.normalize(model(batch["x"].flip(1)), dim=-1)
    return F.cross_entropy(a @ b.t() / 0.1, torch.arange(len(a))) + F.triplet_margin_loss(a, b, a.roll(1, 0))


def clipped(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["x"])
    chosen = logits.log_softmax(-1).gather(1, batch["y"][:, None])[:, 0]
    gain = (batch["x"].sum(1) - logits.mean(1)).detach()
    ratio = (chosen - chosen.detach()).exp()
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    return -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean() - 0.01 * entropy


def heard(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    window = torch.hann_window(16, dtype=torch.float64)
    ours, theirs = (torch.stft(x, 16, 4, window=window, return_complex=True).abs() for x in (model(batch["x"]), batch["x"].roll(1, 1)))
    return F.l1_loss(ours, theirs) + (ours.clamp_min(1e-5).log() - theirs.clamp_min(1e-5).log()).abs().mean()


def paths(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The forward algorithm of a conditional random field, in a Python loop."""
    score, y, moves = model(batch["x"]), batch["y"], model.moves
    alpha = score[0]
    for row in score[1:]:
        alpha = torch.logsumexp(alpha[:, None] + moves, 0) + row
    return torch.logsumexp(alpha, 0) - score.gather(1, y[:, None]).sum() - moves[y[:-1], y[1:]].sum()


def idioms() -> list[Model]:
    two = lambda f, **more: lambda: Net(f, first=lin(), head=lin(3), **more)  # noqa: E731
    weight = lambda *shape: nn.Parameter(0.3 * torch.randn(*shape))  # noqa: E731
    rowed: dict[str, Callable[[], nn.Module]] = {
        **{kind: (lambda kind=kind: parametrized(kind)) for kind in ("weight_norm", "spectral_norm", "orthogonal", "symmetric")},
        "a layer that is called twice": two(lambda s, x: s.head(s.first(s.first(x).relu()))),
        "tied and transposed": two(lambda s, x: s.head(F.linear(s.first(x).tanh(), s.first.weight.t()))),
        "checkpoint, reentrant": two(lambda s, x: s.head(checkpoint(s.inner, s.first(x), use_reentrant=True)), inner=lin()),
        "checkpoint": two(lambda s, x: s.head(checkpoint(s.first, x, use_reentrant=False))),
        "autograd.Function": two(lambda s, x: s.head(F.linear(x, Quantize.apply(s.first.weight)))),
        "bilinear and einsum": two(both, w=weight(8, 8), b=nn.Bilinear(8, 8, 3)),
        "in place": two(lambda s, x: s.head(s.first(x).clone().mul_(0.5).add_(0.1).relu_())),
        "index_put": two(lambda s, x: s.head(torch.zeros_like(x).index_put_((torch.arange(len(x)) % 4,), s.first(x), accumulate=True))),
        "expanded": two(lambda s, x: s.head(s.w.expand(len(x), -1) * x + s.first(x).unfold(1, 4, 4).flatten(1)), w=weight(1, 8)),
        "sorted": two(lambda s, x: s.head(s.first(x).sort(-1).values.cumsum(-1) + s.first(x).cummax(-1).values)),
        "codes of a buffer": lambda: Net(codebook, first=lin(4), head=nn.Linear(4, 3), code=torch.randn(6, 4), counts=torch.zeros(6)),
        "a buffer that is assigned": two(averages, mean=torch.zeros(8)),
        "a graph": two(neighbours), "an ODE": two(midpoints), "linear algebra": two(solves, weight=weight(8, 8)),
        "experts by index": lambda: Net(tokens_for_experts, gate=lin(4), experts=nn.ModuleList(lin() for _ in range(4)), head=lin(3)),
        "vmap over modules": lambda: Net(ensemble, several=nn.ModuleList(lin(3) for _ in range(3))),
        "torch.cond": two(lambda s, x: s.head(torch.cond(x.sum() > 0, lambda x: s.first(x), lambda x: 2 * s.first(x), (x,)))),
        "a reversible layer": two(lambda s, x: s.head(sum(Reversed.apply(s.first(x).tanh(), x, s.first, s.other))), other=lin()),
        "a reversed gradient": two(turned_back), "a generator of its own": two(noisy_the_same), "second derivatives": two(curved),
        "a queue": two(queued, other=lin(), queue=torch.randn(12, 8, generator=generator(0))), "hooks while it runs": two(collected),
        "a seed in forward": two(seeded),
        "torch.compile": two(lambda s, x: s.head(s.wrapped(x)), wrapped=torch.compile(nn.Sequential(lin(), nn.Tanh()), backend="eager")),
        "a buffer assigned by value": two(counted_by_value, at=torch.zeros((), dtype=torch.long)),
        "a checkpoint by value": two(cut_by_value),
        "packed": lambda: Net(packed, rnn=nn.GRU(4, 8, batch_first=True), head=lin(3)),
        "rows by value": two(lambda s, x: s.head(s.first(x)) + s.other(x[x[:, 0] > 0]).sum(0)[:3], other=lin()),
        "printed": two(lambda s, x: (lambda y: print(f"{y.mean().item():.2f}") or s.head(y))(s.first(x))),
        "NumPy of the batch": two(lambda s, x: s.head(s.first(x) @ torch.from_numpy(np.corrcoef(x.numpy().T)))),
        "inference mode": two(lambda s, x: s.head(s.first(x) + without(s.other, x)), other=lin()),
        "a branch on a parameter": two(lambda s, x: s.head(s.first(x)) * (2 if s.first.bias.sum().item() > 0 else 1)),
    }  # fmt: skip
    nets = {
        "frequencies": (lambda: Net(spectrum, weight=weight(3, 3, 4, 4, 2), head=nn.Linear(3, 3)), pictures, classes),
        "grid_sample": (lambda: Net(turned, turn=nn.Parameter(torch.eye(2, 3)), head=nn.Linear(3, 3)), pictures, classes),
        "gradient penalty": (two(lambda s, x: s.head(s.first(x).tanh())), rows, penalized),
        "two losses": (lambda: Net(lambda s, x: s.first(x), first=lin(), head=lin(1)), rows, told_apart),
        "gradients of samples": (two(lambda s, x: s.first(x)), rows, per_sample),
        "a residual": (two(lambda s, x: s.head(s.first(x).tanh())), rows, solved),
        "forms": (two(lambda s, x: s.head(s.first(x).tanh())), lengths, of_lengths),
        "inner steps": (lambda: nn.Sequential(lin(), nn.Tanh(), lin(3)), rows, adapted),
        "contrastive": (lambda: nn.Sequential(lin(), nn.Tanh(), lin()), rows, contrasted),
        "clipped ratio": (lambda: nn.Sequential(lin(), nn.Tanh(), lin(3)), rows, clipped),
        "spectrogram": (
            lambda: Net(heard_twice, first=nn.Conv1d(1, 4, 9, padding=4), out=nn.Conv1d(4, 1, 9, padding=4)), waves, heard,
        ),
        "random field": (lambda: Net(lambda s, x: s.first(x), first=lin(3), moves=weight(3, 3)), rows, paths),
    }  # fmt: skip
    cases = [Model(f"idiom: {name}", build, rows, classes) for name, build in rowed.items()]
    return cases + [Model(f"idiom: {name}", build, batch, loss) for name, (build, batch, loss) in nets.items()]


def adapters() -> list[Model]:
    import peft
    import transformers

    task = {"task_type": "CAUSAL_LM"}
    queries: dict[str, Any] = {"target_modules": ["q_proj", "v_proj"], **task}
    settings = {
        "LoRA": peft.LoraConfig(r=4, init_lora_weights=False, **queries), "DoRA": peft.LoraConfig(r=4, use_dora=True, **queries),
        "LoRA and a head": peft.LoraConfig(r=4, use_rslora=True, modules_to_save=["lm_head"], **queries),
        "IA3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **task),
        "prompt tuning": peft.PromptTuningConfig(num_virtual_tokens=3, **task), "LoHa": peft.LoHaConfig(r=4, **queries),
        "prefix tuning": peft.PrefixTuningConfig(num_virtual_tokens=3, **task), "OFT": peft.OFTConfig(oft_block_size=4, **queries),
    }  # fmt: skip
    build = lambda config: peft.get_peft_model(transformers.LlamaForCausalLM(zoo_models.tiny(transformers.LlamaConfig)), config)  # noqa: E731
    return [Model(f"peft: {n}", lambda c=c: build(c), zoo_models.words, lambda m, b: m(**b).loss) for n, c in settings.items()]


def noisy(n: int, seed: int) -> dict[str, Tensor]:
    g = generator(seed)
    x, noise, text = (torch.randn(n, *size, generator=g).double() for size in ((4, 16, 16), (4, 16, 16), (6, 16)))
    return {"x": x, "noise": noise, "text": text, "time": torch.randint(0, 1000, (n,), generator=g)}


def diffusion() -> list[Model]:
    import diffusers as D

    small = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
    heads = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4, "out_channels": 4, "sample_size": 16}
    build: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, dict[str, Tensor]], Tensor]]] = {
        "UNet2DModel": (
            lambda: D.UNet2DModel(
                sample_size=16, in_channels=4, out_channels=4, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8, **small,
            ), lambda m, b: m(b["x"], b["time"]).sample,
        ),
        "UNet2DConditionModel": (
            lambda: D.UNet2DConditionModel(
                sample_size=16, cross_attention_dim=16, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), attention_head_dim=8, **small,
            ), lambda m, b: m(b["x"], b["time"], b["text"]).sample,
        ),
        "AutoencoderKL": (
            lambda: D.AutoencoderKL(
                in_channels=4, out_channels=4, latent_channels=4, down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2, **small,
            ), lambda m, b: m.decode(m.encode(b["x"]).latent_dist.mode()).sample,
        ),
        "SD3Transformer2DModel": (
            lambda: D.SD3Transformer2DModel(
                patch_size=2, joint_attention_dim=16, caption_projection_dim=16, pooled_projection_dim=16, **heads
            ),
            lambda m, b: m(b["x"], encoder_hidden_states=b["text"], pooled_projections=b["text"][:, 0], timestep=b["time"]).sample,
        ),
    }  # fmt: skip
    loss = lambda m, b, run: F.mse_loss(run(m, b), b["noise"])  # noqa: E731
    return [Model(f"diffusers: {n}", make, noisy, functools.partial(loss, run=run)) for n, (make, run) in build.items()]


def cases() -> list[Model]:
    there = {name: importlib.util.find_spec(name) is not None for name in ("peft", "diffusers")}
    return [*idioms(), *(adapters() if there["peft"] else []), *(diffusion() if there["diffusers"] else [])]
