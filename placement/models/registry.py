"""Which adapter reads which model directory. Owns the list of supported model types."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

from placement.errors import CheckpointError
from placement.formats import parse_format
from placement.headers import CheckpointHeaders, read_headers, read_json, without_collector
from placement.models import glm5_next, qwen3_5_moe, qwen4_exp
from placement.models.assembly import without_quantisation
from placement.models.quantised import with_format
from placement.spec import ModelSpec

Adapter = Callable[
    [str, Mapping[str, Any], Mapping[str, Any] | None, CheckpointHeaders | None], ModelSpec
]
CONFIG_PREFIX = "config.json: "  # how errors of ConfigReader begin
RUN = (qwen4_exp,)  # families that ranks execute
PLANNED = (qwen3_5_moe, glm5_next)  # families with an obstacle of their own: plan and inspect only
RUN_TYPES = tuple(sorted(name for family in RUN for name in family.MODEL_TYPES))
PLANNED_TYPES = tuple(sorted(name for family in PLANNED for name in family.MODEL_TYPES))
ADAPTERS: Mapping[str, Adapter] = {
    model_type: family.build_spec
    for family in (*RUN, *PLANNED)
    for model_type in family.MODEL_TYPES
}


@without_collector()
def load_model_spec(model_dir: str) -> tuple[ModelSpec, CheckpointHeaders]:
    """Spec and headers of a model directory; reads JSON and headers, never a weight.

    Raises CheckpointError in one line for anything that can't be loaded.
    """
    headers = read_headers(model_dir)
    return spec_from_headers(headers), headers


@without_collector()
def spec_from_headers(headers: CheckpointHeaders) -> ModelSpec:
    """Spec of a model directory whose headers were read; reads its JSON files."""
    config_path = os.path.join(headers.model_dir, "config.json")
    generation_path = os.path.join(headers.model_dir, "generation_config.json")
    config = read_json(config_path)
    adapter = _adapter(config_path, config)
    generation = read_json(generation_path) if os.path.exists(generation_path) else None
    name = os.path.basename(os.path.abspath(headers.model_dir))
    return adapter(name, config, generation, headers)


@without_collector()
def spec_from_config(
    config_path: str, headers: CheckpointHeaders | None = None, format: str | None = None
) -> ModelSpec:
    """Spec of a model that isn't on this machine, from its `config.json`, for planning.

    `headers` may come from a dump (`read_header_dump`); without them the tensors are those of a
    plain export, or of the FP8 release that the config describes. `format` (see `parse_format`)
    plans the routed experts in another format; without headers all else is then plain, whatever
    the config says. The end tokens are those of the config.
    """
    rule = parse_format(format) if format is not None else None
    config = read_json(config_path)
    if rule is not None and headers is None:
        config = without_quantisation(config)
    name = os.path.basename(os.path.dirname(os.path.abspath(config_path))) or "model"
    adapter = _adapter(config_path, config)
    try:
        spec = adapter(name, config, None, headers)
    except CheckpointError as error:
        raise _naming(config_path, error) from error
    return with_format(spec, rule) if rule is not None else spec


def require_runnable(spec: ModelSpec) -> None:
    """CheckpointError in one line for a model that can be planned but that no rank can execute."""
    if spec.runnable:
        return
    more = f" (and {len(spec.obstacles) - 1} more)" if len(spec.obstacles) > 1 else ""
    raise CheckpointError(
        f"{spec.name} ({spec.family}) can't be run: {spec.obstacles[0]}{more}; "
        "nrank plan and nrank inspect work on it"
    )


def _naming(config_path: str, error: CheckpointError) -> CheckpointError:
    """The error with the file that was given; adapters know it as "config.json" only."""
    text = str(error)
    if text.startswith(CONFIG_PREFIX):
        text = f"{config_path}: {text.removeprefix(CONFIG_PREFIX)}"
    return CheckpointError(text)


def _adapter(config_path: str, config: Mapping[str, Any]) -> Adapter:
    model_type = config.get("model_type")
    adapter = ADAPTERS.get(model_type) if isinstance(model_type, str) else None
    if adapter is None:
        raise CheckpointError(
            f"{config_path}: model_type {model_type!r} is not supported; "
            f"can be run: {', '.join(RUN_TYPES)}; can only be planned: {', '.join(PLANNED_TYPES)}"
        )
    return adapter
