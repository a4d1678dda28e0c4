"""Convolutional nets with batch normalization under bfloat16 autocast: losses as plain PyTorch's, one rank and two, whatever came before."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import on_device
import parity
import pytest
import ranks
import torch
import transformers
import zoo_models
from torch import nn
from torch.nn import functional as F

import interlace
from interlace.capture import device_casts

Tensor = torch.Tensor
SIZE = 32


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.lower, self.bottom = twice(3, 8), twice(8, 16), twice(16, 32)
        self.rise, self.upper = nn.ConvTranspose2d(32, 16, 2, 2), twice(32, 16)
        self.last_rise, self.up = nn.ConvTranspose2d(16, 8, 2, 2), twice(16, 8)
        self.head, self.pool = nn.Conv2d(8, 5, 1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down(x)
        b = self.lower(self.pool(a))
        c = self.bottom(self.pool(b))
        b = self.upper(torch.cat([self.rise(c), b], 1))
        return self.head(self.up(torch.cat([self.last_rise(b), a], 1)))


def twice(into: int, out: int) -> nn.Module:
    convolved = [nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*convolved, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", num_labels=5)
    return transformers.ResNetForImageClassification(config)


def efficientnet() -> nn.Module:
    config = transformers.EfficientNetConfig(
        image_size=SIZE, width_coefficient=0.25, depth_coefficient=0.2, hidden_dim=320, num_labels=5, dropout_rate=0.0, drop_connect_rate=0.0
    )
    return transformers.EfficientNetForImageClassification(config)


NETS: dict[str, Callable[[], nn.Module]] = {"resnet": resnet, "efficientnet": efficientnet, "unet": UNet}


def pictures(rows: int, seed: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(2 * rows, 3, SIZE, SIZE, generator=g), "y": torch.randint(0, 5, (2 * rows,), generator=g)}


def plain_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    out: Any = model(batch["x"])
    logits, labels = getattr(out, "logits", out), batch["y"]
    return F.cross_entropy(logits, labels if logits.dim() == 2 else labels[:, None, None].expand(-1, *logits.shape[2:]))


def cast_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast(on_device.DEVICE, dtype=torch.bfloat16):
        return plain_loss(model, batch)


def there(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.to(on_device.DEVICE) for name, t in batch.items()}


def losses_of(net: str, casts: tuple[bool, ...]) -> list[tuple[list[float], list[float]]]:
    """On this rank: the losses of training with and without autocast in turn, and plain PyTorch's, of the mean over the ranks."""
    rank, size = parity.rank_and_size()
    found = []
    for cast in casts:
        loss = cast_loss if cast else plain_loss
        case = zoo_models.Model(net, NETS[net], pictures, loss)
        torch.manual_seed(0)
        model = case.build().train()
        on_it = dataclasses.replace(case, batch=lambda rows, seed: there(pictures(rows, seed)))
        expected = zoo_models.eager(copy.deepcopy(model).to(on_device.DEVICE), on_it, size)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        with interlace.compile(model, optimizer, loss, pictures(2, rank), interlace.Config(schedule=[], cache="off")) as trainer:
            steps = range(zoo_models.STEPS)
            found.append(([parity.mean_over_ranks(trainer.step(pictures(2, 10 * i + rank))) for i in steps], expected))
    return found


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("net", list(NETS))
def test_losses_are_eagers(net: str, size: int) -> None:
    for casts in ((True, False, True),):
        for cast, (ours, expected) in zip(casts, ranks.run(losses_of, size, net, casts)[0], strict=True):
            assert ours == pytest.approx(expected, rel=1e-6 if cast else 1e-5)


@pytest.mark.parametrize("net", list(NETS))
def test_what_was_compiled_before_does_not_matter(net: str) -> None:
    first, second = ranks.run(losses_of, 1, net, (False, True))[0], ranks.run(losses_of, 1, net, (True, False))[0]
    assert first == second[::-1]


class Mixed(nn.Module):
    """What regions cast on some device: narrow, wide, with a dtype of the result, to the widest, and what they leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.slope, self.second = nn.Linear(8, 8), nn.LayerNorm(8), nn.PReLU(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.fc(x)
        with torch.autocast(on_device.DEVICE, enabled=False):
            wide = self.second(y.float())
        z = self.slope(self.norm(y)) + self.slope(y)
        found = {
            "fc": y, "wide": wide, "norm": self.norm(y), "softmax": torch.softmax(y, -1), "prelu": self.slope(y), "exp": y.exp(),
            "cumsum": y.cumsum(0), "sum": y.sum(0), "of given dtype": torch.softmax(y, -1, dtype=torch.bfloat16), "length": y.norm(),
            "lengths": torch.norm(y, 2, 1), "power": y.abs().pow(0.5), "dot": torch.dot(y[0], y[0]), "mv": torch.mv(x, x[0]),
            "einsum": torch.einsum("ab,cb->ac", x, y), "addcmul": torch.addcmul(y, x, x), "cat": torch.cat([y, wide]), "tanh": y.tanh(),
            "double": torch.mv(x.double(), x[0].double()),
            "sdpa": F.scaled_dot_product_attention(y[None, None], x[None, None], y[None, None]), "mix": x @ self.second(z),
        }  # fmt: skip
        return {**found, "rms": F.rms_norm(y, (8,)), "stack": torch.stack([y, y]), "mse": F.mse_loss(y, x)}


def mixed_loss(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found = model(batch["x"])
    loss = sum(t.float().square().mean() for name, t in found.items() if name != "double")
    return {**found, "loss": loss + F.cross_entropy(found["mix"], batch["y"])}


def under_region(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    with torch.autocast(on_device.DEVICE, dtype=torch.bfloat16):
        return mixed_loss(model, batch)


def mixed() -> tuple[nn.Module, list[dict[str, Tensor]]]:
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    return Mixed(), [{"x": torch.randn(8, 8, generator=g), "y": torch.randint(0, 8, (8,), generator=g)} for _ in range(3)]


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x) for x, y in zip(a, b, strict=True))


def trained(loss_fn: Callable[..., Any], **config: Any) -> tuple[list[dict[str, Tensor]], str]:
    """What three steps give, and the program."""
    model, batches = mixed()
    settings = interlace.Config(schedule=[], cache="off", **config)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.05), loss_fn, batches[0], settings) as trainer:
        found = []
        for batch in batches:
            loss = trainer.step(batch).cpu()
            found.append({**{name: parts[0].cpu() for name, parts in trainer.outputs.items()}, "loss": loss})
        return found, trainer.program


@pytest.mark.parametrize("around", [False, True], ids=["of the loss", "around all"])
def test_a_region_casts_what_the_devices_casts(around: bool) -> None:
    """Regions for devices cast what those for CPUs do: losses, norms and softmax stayed narrow, which CUDA widens. One that was open around
    everything, backward too, counted for nothing."""
    model, batches = mixed()
    model = model.to(on_device.DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.autocast(on_device.DEVICE, dtype=torch.bfloat16, enabled=around):
        found, program = trained(mixed_loss if around else under_region)
    assert ": bf16[" in program
    for ours, batch in zip(found, batches, strict=True):
        with torch.autocast(on_device.DEVICE, dtype=torch.bfloat16, enabled=around):
            expected = (mixed_loss if around else under_region)(model, there(batch))
            expected["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, t in expected.items():
            torch.testing.assert_close(ours[name], t.detach().cpu(), rtol=2e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}")
        assert ours["loss"].item() == pytest.approx(expected["loss"].item(), rel=1e-5)


@pytest.mark.parametrize("own", [False, True])
def test_the_setting_opens_the_devices_region(own: bool) -> None:
    """It opened CPUs', in their dtype."""

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast(on_device.DEVICE):
            return mixed_loss(model, batch)

    found, expected = trained(loss_fn if own else mixed_loss, param_dtype="autocast"), trained(loss_fn)
    assert same(found[0], expected[0])
    assert {"cpu": ": bf16[", "soft": ": f16["}.get(on_device.DEVICE, "f16[") in found[1]  # torch's default


@pytest.mark.software
def test_a_region_of_another_device_around_all_is_none() -> None:
    with torch.autocast("cpu"):
        found = trained(mixed_loss)
    assert same(found[0], trained(mixed_loss)[0])


class Rotated(nn.Module):
    """Its angles are never narrow, wherever its tensors lie."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        places = 1000 + torch.arange(len(x), device=x.device, dtype=torch.float32)
        with torch.autocast(device_type=x.device.type, enabled=False):
            angles = places[:, None] @ torch.ones(1, 8, device=x.device)
        with torch.autocast(device_type=x.device.type, dtype=torch.bfloat16):
            y = self.fc(x)
        assert y.dtype == torch.bfloat16
        return y * angles.cos()


@pytest.mark.parametrize("around", [False, True])
def test_a_region_of_the_device_that_a_tensor_says_it_has(around: bool) -> None:
    """A trace's tensors say that they are CPUs', and so a region that is to cast nothing did not count for another device's model."""
    torch.manual_seed(0)
    model, batch = Rotated().to(on_device.DEVICE), there({"x": torch.randn(8, 8)})

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast(on_device.DEVICE, dtype=torch.bfloat16, enabled=around):
            return model(batch["x"]).float().square().mean()

    expected = loss_fn(model, batch).item()
    settings = interlace.Config(schedule=[], cache="off")
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch, settings) as trainer:
        assert trainer.step(batch).item() == pytest.approx(expected, rel=1e-6)


class Product(torch.autograd.Function):
    """Its inputs come wide, whatever is narrow around it."""

    @staticmethod
    @torch.amp.custom_fwd(device_type=on_device.DEVICE, cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    @torch.amp.custom_bwd(device_type=on_device.DEVICE)
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        assert grad.dtype == torch.float32
        return grad * y, grad * x


def test_inputs_that_a_function_of_autograd_has_cast() -> None:
    """A trace's tensors say that they are CPUs', and those of another device's model stayed narrow."""
    torch.manual_seed(0)
    model, batch = nn.Linear(8, 8).to(on_device.DEVICE), there({"x": torch.randn(8, 8)})

    def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        with torch.autocast(on_device.DEVICE, dtype=torch.bfloat16):
            y = model(batch["x"])
            found = Product.apply(y, y)
        return {"loss": found.float().mean(), "found": found}

    settings = interlace.Config(schedule=[], cache="off")
    expected = loss_fn(model, batch)
    with interlace.compile(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, batch, settings) as trainer:
        assert trainer.step(batch).item() == pytest.approx(expected["loss"].item(), rel=1e-6)
        assert trainer.outputs["found"][0].dtype == expected["found"].dtype == torch.float32


@pytest.mark.skipif(torch.__version__ < "2.13", reason="earlier ones have overloads for named dimensions, too")
def test_the_lists_are_torchs() -> None:
    """An operator that a later torch has a rule for, and the lists have not, would be cast as on CPUs."""
    theirs = {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")}
    lists = device_casts.NARROW, device_casts.WIDE, device_casts.WIDE_RESULT, device_casts.WITH_DTYPE, device_casts.WIDEST
    ours = [name for names in lists for name in names]
    assert theirs - {"cudnn_convolution", "cudnn_convolution_transpose", "_cudnn_rnn"} <= {*ours, device_casts.REFUSED}
    assert len(set(ours)) == len(ours)
