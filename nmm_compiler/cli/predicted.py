"""The whole model's prediction on the pages of `report`, `explain` and `compress`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nmm_compiler.report.parts import Line, Part, Section

if TYPE_CHECKING:
    from nmm_compiler.prediction.model import ModelPrediction


def predict_loaded(
    name: str, model: Any, inputs: dict[str, Any], target: str, ratio: float | None
) -> ModelPrediction:
    """Return the prediction of a model that a command took by name, for the inputs that it runs.

    name: a directory is predicted by its configuration, which knows the dense model that a
    low-rank one was. ratio: predict it low-rank, too. Raises what `predict` raises.
    """
    from nmm_compiler.prediction.predict import predict

    setting: dict[str, Any] = {"ratio": ratio}
    generates = getattr(model, "can_generate", bool)()
    first = next((value for value in inputs.values() if hasattr(value, "shape")), None)
    if first is not None:
        sizes = first.shape[:-1] if first.is_floating_point() else first.shape
        if 1 <= len(sizes) <= 2:  # [tokens] or [sequences, tokens]
            setting |= {"batch": sizes[0] if len(sizes) == 2 else 1, "prompt": sizes[-1]}
    if not generates:
        setting |= {"inputs": inputs}
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if generates and (Path(name) / "config.json").is_file():
        dtype = str(dtypes[0]).removeprefix("torch.") if dtypes else None
        return predict(name, target, dtype=dtype, **setting)
    return predict(model, target, **setting)


def predicted_parts(made: ModelPrediction | Exception) -> list[Part]:
    """Return the section of a page with a prediction, or a line that says why there is none."""
    if isinstance(made, Exception):
        return [Line(f"the whole model is not predicted: {made}", "note")]
    return [Section("the whole model, predicted", tuple(made.parts()))]
