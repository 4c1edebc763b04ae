"""The peak rates of devices, by the names that drivers give."""

from __future__ import annotations

import pytest

from pipeworker.facts.layer_facts import LayerFacts, NetworkFacts
from pipeworker.facts.peak import peak_flops


@pytest.mark.parametrize(
    ("device", "precision", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "fp16", 756e12),
        ("NVIDIA H200", "fp32", 67e12),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("Tesla T4", "fp32", 8.1e12),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA T400 4GB", "fp32", None),
        ("AMD EPYC 7763 64-Core Processor", "fp32", None),
    ],
)
def test_the_peak_of_a_device(device: str, precision: str, peak: float | None) -> None:
    assert peak_flops(device, precision) == peak


def test_the_operations_of_a_sample_are_those_of_all_layers() -> None:
    layers = (LayerFacts("a", flops=300), LayerFacts("b", flops=100), LayerFacts("c"))
    assert NetworkFacts(layers, samples=4).flops_per_sample == 100.0
