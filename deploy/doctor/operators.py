"""Operators of a device against the reference, at a model's shapes: findings and a file of them."""

from __future__ import annotations

from pathlib import Path

from deploy.doctor.finding import Finding, Severity


def probe_operators(device_name: str, model_dir: str, dtype: str, path: Path) -> list[Finding]:
    """One finding a variant; `path` gets all results. ConfigError without the device or the model.

    A variant that failed is no error: the reference runs in its place.
    """
    from ops.capability_file import OpResult, write
    from placement.models.registry import load_model_spec
    from rank_worker.device import open_device
    from rank_worker.model import parameter_dtype
    from rank_worker.op_probe import TOLERANCE, probe, sizes_of

    (spec, _), kind = load_model_spec(model_dir), parameter_dtype(dtype)
    device = open_device(device_name)
    device.begin(0, kind)
    results = probe(device, spec, kind)
    write(path, device.capability(kind), sizes_of(spec), results)

    def finding(name: str, result: OpResult) -> Finding:
        error = "" if result.error is None else f", largest error {result.error:.2g}"
        return Finding(
            id="nrank.operator",
            severity=Severity.OK if result.is_passed else Severity.WARNING,
            found=f"{result.result}{error}",
            expected=f"within {TOLERANCE[kind]:g} of the reference's largest value",
            source=str(path),
            remedy="" if result.is_passed else f"set ops_file to {path}: the reference runs then",
            subject=name,
        )

    found = [finding(name, result) for name, result in results.items()]
    if not found:
        reason = f"no operator of {device_name} runs in {dtype} here; the reference does all"
        remedy = "choose another --dtype, or see nrank doctor"
        return [Finding("nrank.operator", Severity.WARNING, reason, remedy=remedy)]
    return found
