"""Random cuts of any model's parameters over two ranks: the loss, gradients and buffers of the whole program.

As test_tensor_pass.py without a runtime, in one process. Cuts are drawn, so most of them are none that a person would choose.
"""

from __future__ import annotations

import random
import re
import warnings

import pytest
import torch
import zoo_models
from evaluator import Evaluator
from rank_evaluator import RankEvaluator
from torch import Tensor, nn

from interlace import _core
from interlace.capture import capture
from interlace.errors import CaptureError

OPTIONS = ["", ",sequence=false", ",regather=true", ",bucket=0"]
SAMPLE = [
    ("FNetForMaskedLM", 0),  # complex numbers, seen as pairs
    ("idiom: second derivatives", 2),  # diagonals
    ("torch.nn.ConvTranspose2d", 2),  # weights whose first dimension is the input's
    ("T5ForConditionalGeneration", 1),
    ("Qwen3ForCausalLM", 0),
    ("ConvNextForImageClassification", 0),
]
# Gradients without meaning: all logits are equal to rounding; the mask of a whole row, whose mean is 0 / 0. Sizes of 0.
ILL = ["EfficientNetForImageClassification", "LEDForConditionalGeneration", "MobileBertForMaskedLM"]
# What the evaluator lacks: opaque modules, inputs that are none, strides that a library's kernel chooses and a runtime need not.
UNREAD = r"opaque module|NoneType|strides \(|overflow|same dtype|prompt_tokens|declared|trainable group"


def far(a: Tensor, b: Tensor, scale: float) -> float:
    return (a - b).abs().max().item() / scale if a.numel() else 0.0


def check(case: zoo_models.Model, seed: int) -> None:
    torch.manual_seed(0)
    model = case.build().double().train()
    for m in model.modules():
        if isinstance(m, nn.modules.dropout._DropoutNd):
            m.p = 0.0
    batch = {k: v.double() if v.is_floating_point() else v for k, v in case.batch(2, 0).items()}
    text = re.sub(r'^meta tensor ".*"\n', "", capture(model, case.loss, batch).text, flags=re.MULTILINE)
    draw = random.Random(f"{case.name}{seed}")
    drawn = [
        f"{n} {draw.randrange(p.dim())}{draw.choice(['', '', ' blocks 2'])}"
        for n, p in model.named_parameters() if p.dim() > 0 and draw.random() < 0.6
    ]  # fmt: skip
    if not drawn:
        return
    head, _, rest = text.partition("\n")
    program = _core.Program.parse(f'{head}\nmeta tensor "{"; ".join(drawn)}"\n{rest}')
    program.run_passes("canonicalize")
    whole = program.print()
    tensors = {n: t.detach() for n, t in [*model.named_parameters(remove_duplicate=False), *model.named_buffers()]}
    inputs = [batch[found[1]] for line in whole.splitlines() if (found := re.match(r'input .*"([^"]*)"', line))]
    torch.manual_seed(7)
    expected = Evaluator(whole, tensors).run(inputs)
    program.run_passes(f"mesh(axes=dp:1+tp:2),tensor(axis=tp,plan=model{draw.choice(OPTIONS)})")
    torch.manual_seed(7)
    cut = RankEvaluator(program.print(), tensors, "tp", 2)
    results = cut.run(inputs)
    for result in results:
        for n, value in expected["outputs"].items():
            assert far(value, result["outputs"][n], max(value.abs().max().item(), 1e-30)) < 1e-6, f"output {n}"
    largest = max([g.abs().max().item() for g in expected["grads"].values() if g.numel()] or [1.0]) or 1.0
    for n, gradient in expected["grads"].items():
        assert far(gradient, cut.whole(n, [r["grads"][n] for r in results]), largest) < 1e-6, f"gradient of {n}"


@pytest.mark.parametrize(("name", "seed"), SAMPLE, ids=lambda x: str(x))
def test_a_sample(name: str, seed: int) -> None:
    check(next(c for c in zoo_models.cases() if c.name == name), seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_the_zoo(seed: int) -> None:
    warnings.simplefilter("ignore")
    wrong = []
    for case in zoo_models.cases():
        try:
            case.build()
        except Exception:
            continue
        try:
            if case.name not in ILL:
                check(case, seed)
        except CaptureError:
            continue  # which test_zoo.py is about
        except Exception as e:
            if not re.search(UNREAD, str(e)):
                wrong.append(f"{case.name}: {type(e).__name__} {str(e)[:200]}")
    assert wrong == [], "\n".join(wrong)
