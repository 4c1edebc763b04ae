"""The distribution of weights to the files of an export."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeworker.errors import UsageError
from pipeworker.record.checkpoint.manifest import weights_index
from pipeworker.record.weights import export


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("1B", 1), ("500MB", 500_000_000), ("5GB", 5 * 10**9), ("2tb", 2 * 10**12)),
        *(("3KB", 3000), ("1KiB", 1024), ("2 GiB", 2 << 30), (" 7MIB ", 7 << 20)),
    ],
)
def test_shard_bytes_reads_sizes(text: str, size: int) -> None:
    assert export.shard_bytes(text) == size


@pytest.mark.parametrize(
    "text", ["", "5", "GB", "0MB", "-1GB", "1.5GB", "1 IB", "1PB", "1GB2", "٣GB", "9" * 99 + "B"]
)
def test_shard_bytes_refuses_other_texts(text: str) -> None:
    with pytest.raises(UsageError, match="must be a size, as 500MB or 5GB"):
        export.shard_bytes(text)


@given(st.dictionaries(st.text(), st.integers(0, 20)), st.integers(1, 30))
def test_tensors_are_distributed_in_order(sizes: dict[str, int], most: int) -> None:
    files = export.split_files(sizes, most)
    assert [name for file in files for name in file] == list(sizes)
    held = [sum(sizes[name] for name in file) for file in files]
    assert all(size <= most or len(file) == 1 for size, file in zip(held, files, strict=True))
    for size, after in zip(held, files[1:], strict=False):
        assert after
        assert size + next(iter(after.values())) > most  # it had no room in the file before


def test_names_and_index_of_files() -> None:
    assert export.file_names(1) == ["model.safetensors"]
    first, second = export.file_names(2)
    assert first == "model-00001-of-00002.safetensors"
    assert weights_index({first: {"a": 1, "b": 2}, second: {"c": 4}}) == {
        "metadata": {"total_size": 7},
        "weight_map": {"a": first, "b": first, "c": second},
    }
