"""What torch.autocast casts on the model's device, where that is not what it casts on CPUs, on which a trace's tensors lie.

    region                        matmul, linear    softmax, layer_norm, exp    avg_pool3d
    torch.autocast("cpu")         narrow            as they come                float32
    torch.autocast("cuda")        narrow            float32                     as they come

While a trace runs for a device, CPUs' operators have the device's rules: which operators it has any for the dispatcher knows, and what they
are ATen/autocast_mode.h says, whose lists are below. They are kernels for the dispatch key AutocastCPU and go with the trace.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

Tensor = torch.Tensor


def _listed(words: str) -> list[str]:
    return words.split()


NARROW = _listed(
    """
    _convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input conv_transpose3d.input
    convolution prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot
    _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell _scaled_dot_product_flash_attention
    scaled_dot_product_attention
    """
)
WIDE = _listed(
    """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus
    layer_norm native_layer_norm rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity poisson_nll_loss
    cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits dist pdist cdist renorm
    logsumexp upsample_nearest1d _upsample_nearest_exact1d upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d
    _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa upsample_trilinear3d upsample_bicubic2d
    _upsample_bicubic2d_aa linalg_matrix_sqrth
    """
)
WIDE_RESULT = _listed(
    """
    prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm linalg_matrix_norm linalg_matrix_norm.str_ord sum
    sum.dim_IntList
    """
)
WITH_DTYPE = {"norm.Scalar": "norm.ScalarOpt_dtype", "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype"}
WIDEST = _listed("addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot scatter_add")
REFUSED = "binary_cross_entropy"

_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)


def _with_rules(key: str) -> set[str]:
    """Operators that have a kernel for this dispatch key."""
    return {name.removeprefix("aten::") for name in torch._C._dispatch_get_registrations_for_dispatch_key(key)}


def _op(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _counts(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and x.dtype != torch.float64


class _Rules:
    """The kernels of a trace; weights that were cast to the narrow dtype are kept while a region is open, as torch keeps them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}  # the tensor, so that its id stays its own

    def forget(self) -> None:
        self._kept.clear()

    def _cast(self, values: Any, dtype: torch.dtype) -> Any:
        narrow = dtype == torch.get_autocast_dtype("cpu") and torch.is_autocast_cache_enabled()

        def one(x: Any) -> Any:
            if not _counts(x) or x.dtype == dtype:
                return x
            if not (narrow and x.dtype == torch.float32 and x.requires_grad and x.is_leaf and not x._is_view()):
                return x.to(dtype)
            if (id(x), dtype) not in self._kept:
                self._kept[id(x), dtype] = x, x.to(dtype)
            return self._kept[id(x), dtype][1]

        return tree_map(one, values)

    def kernel(self, name: str) -> Callable[..., Any]:
        """Of an operator of the lists."""
        op = _op(name)

        def narrow(args: tuple, kwargs: dict) -> Any:
            args, kwargs = self._cast((args, kwargs), torch.get_autocast_dtype("cpu"))
            return op(*args, **kwargs)

        def wide(args: tuple, kwargs: dict) -> Any:
            args, kwargs = self._cast((args, kwargs), torch.float32)
            return op(*args, **kwargs)

        def wide_result(args: tuple, kwargs: dict) -> Any:
            given = {**dict(zip((a.name for a in op._schema.arguments), args, strict=False)), **kwargs}
            if given.get("dtype") is None and _counts(args[0]):
                given["dtype"] = torch.float32
            return op(**given)

        def with_dtype(args: tuple, kwargs: dict) -> Any:
            return _op(WITH_DTYPE[name])(*args, **kwargs, dtype=torch.float32 if _counts(args[0]) else args[0].dtype)

        def widest(args: tuple, kwargs: dict) -> Any:
            wide = any(_counts(x) and x.dtype == torch.float32 for x in tree_flatten((args, kwargs))[0])
            args, kwargs = self._cast((args, kwargs), torch.float32 if wide else torch.get_autocast_dtype("cpu"))
            return op(*args, **kwargs)

        def refused(args: tuple, kwargs: dict) -> Any:
            raise RuntimeError(
                "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast; use "
                "binary_cross_entropy_with_logits, or torch.nn.BCEWithLogitsLoss"
            )

        by_list = ((NARROW, narrow), (WIDE, wide), (WIDE_RESULT, wide_result), (WITH_DTYPE, with_dtype), (WIDEST, widest))
        rule = next((rule for names, rule in by_list if name in names), refused)

        def kernel(*args: Any, **kwargs: Any) -> Any:
            with torch._C._ExcludeDispatchKeyGuard(_KEY):
                return rule(args, kwargs)

        return kernel


@contextlib.contextmanager
def rules_of(device: str) -> Iterator[Callable[[], None]]:
    """Regions for CPUs cast what this device's do; to be called when the outermost of them is left."""
    key = torch._C._dispatch_key_for_device("privateuseone" if device == torch._C._get_privateuse1_backend_name() else device)
    there, here = _with_rules(f"Autocast{key}"), _with_rules("AutocastCPU")
    known = {*NARROW, *WIDE, *WIDE_RESULT, *WITH_DTYPE, *WIDEST, REFUSED}
    same = {name for name in NARROW if name in there and name in here and name != "prelu"}
    rules, library = _Rules(), torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*overrid")  # that is what they are for
            for name in sorted(there & known - same):
                library.impl(name, rules.kernel(name), "AutocastCPU")
            for name in sorted(here - there):
                library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        yield rules.forget
    finally:
        library._destroy()
