"""PEFT: LoRA on low-rank layers under the names that the layers had when they were dense.

`LoraConfig()` and `target_modules=["q_proj", "v_proj"]` find a `LowRankLinear` where they look for
an `nn.Linear`; `install`, which `hf_hook.py` calls, puts an adapter for it in front of PEFT's own
choice of layers. Merging appends the adapter to the factors, so that the layer stays
low-rank and nothing is lost:

    up @ down + s B @ A = [up, s B] @ [down; A],   of rank r + r_lora.

A merged layer is saved with its new rank. Adapters that change the weight in another way (DoRA,
bias) train, and are refused by name when they are merged.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from nmm_compiler.compress.modules import LowRankLinear
from nmm_compiler.errors import OptionTypeError


def install() -> None:
    """Put low-rank adapters in front of PEFT's own layers; calling it again changes nothing."""
    from peft.tuners.lora.model import LoraModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    choose = LoraModel._create_new_module
    if getattr(choose, "knows_low_rank", False):
        return
    kind = _adapter_class()

    def dispatch(config: Any, adapter_name: str, target: nn.Module, **more: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if isinstance(base, LowRankLinear):
            return kind(target, adapter_name, config=config, **more)
        return cast(nn.Module, choose(config, adapter_name, target, **more))

    dispatch.knows_low_rank = True  # type: ignore[attr-defined]
    setattr(LoraModel, "_create_new_module", staticmethod(dispatch))  # noqa: B010


def _adapter_class() -> type[nn.Module]:
    """Return the adapter of a `LowRankLinear`, a subclass of PEFT's of an `nn.Linear`."""
    from peft.tuners.lora.layer import Linear
    from peft.tuners.tuners_utils import check_adapters_to_merge

    class LoraLowRank(Linear):
        """A LoRA adapter on a `LowRankLinear`."""

        def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
            layer = cast(LowRankLinear, module)
            return layer.in_features, layer.out_features

        @torch.no_grad()
        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            """Append the adapters to the factors.

            Raises OptionTypeError for DoRA and other variants, and for adapters with a bias;
            ValueError, as PEFT does, for adapters that are not finite with safe_merge.
            """
            for name in check_adapters_to_merge(self, adapter_names):
                if name not in self.lora_A:
                    continue
                if name in self.lora_variant or self.lora_bias[name]:
                    wanted = "plain LoRA without lora_bias, to be merged into low-rank factors"
                    raise OptionTypeError("adapter", name, wanted)
                a = cast(torch.Tensor, self.lora_A[name].weight)
                b = cast(torch.Tensor, self.lora_B[name].weight) * self.scaling[name]
                if safe_merge and not (torch.isfinite(a).all() and torch.isfinite(b).all()):
                    raise ValueError(f"the adapter {name} has NaN or infinite elements")
                layer = cast(LowRankLinear, self.get_base_layer())
                if not isinstance(layer.down, nn.Linear):
                    raise OptionTypeError("adapter", name, "factors of floats to be merged into")
                down, up = layer.down.weight, layer.up.weight
                _resize(layer, torch.cat([down, a.to(down)]), torch.cat([up, b.to(up)], dim=1))
                self.merged_adapters.append(name)

        @torch.no_grad()
        def unmerge(self) -> None:
            """Take the merged adapters off the factors again, which are then as they were."""
            layer = cast(LowRankLinear, self.get_base_layer())
            while self.merged_adapters:
                rank = layer.rank - self.r[self.merged_adapters.pop()]
                _resize(layer, layer.down.weight[:rank].clone(), layer.up.weight[:, :rank].clone())

    LoraLowRank.__qualname__ = LoraLowRank.__name__  # found by name, so that it can be pickled
    globals()[LoraLowRank.__name__] = LoraLowRank
    return LoraLowRank


def _resize(layer: LowRankLinear, down: torch.Tensor, up: torch.Tensor) -> None:
    """Give a layer other factors in place: down [r, k] and up [n, r]."""
    for linear, weight in ((layer.down, down), (layer.up, up)):
        linear.weight = nn.Parameter(weight.contiguous(), linear.weight.requires_grad)
    layer.down.out_features = layer.up.in_features = down.shape[0]
