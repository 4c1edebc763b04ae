"""The peak rate of devices, from their makers' data sheets: dense products of matrices."""

from __future__ import annotations

import re

_PEAKS: dict[str, tuple[float, float]] = {
    "H200": (67e12, 989e12),
    "H100 PCIe": (51e12, 756e12),
    "H100 NVL": (60e12, 835e12),
    "H100": (67e12, 989e12),
    "A100": (19.5e12, 312e12),
    "A40": (37.4e12, 149.7e12),
    "L40S": (91.6e12, 362e12),
    "L4": (30.3e12, 121e12),
    "V100": (15.7e12, 125e12),
    "T4": (8.1e12, 65e12),
}
"""By words of a device's name, operations a second in fp32 and in 16 bits; longer names first."""


def peak_flops(device: str, precision: str) -> float | None:
    """Return the floating-point operations a second of a device; None if they are not known.

    Args:
        device: its name, as the driver gives it.
        precision: of the layers: ``fp32``, ``bf16`` or ``fp16``.
    """
    for name, (single, half) in _PEAKS.items():
        if re.search(rf"\b{name}\b", device):
            return single if precision == "fp32" else half
    return None
