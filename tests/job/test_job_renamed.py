"""Former names of options: each leads to a present one."""

from __future__ import annotations

import dataclasses

import pytest

from pipeworker.errors import UsageError
from pipeworker.job.options import Options
from pipeworker.job.renamed import RENAMED, migrated, reject_batch_size, reject_renamed
from pipeworker.runs.begin import RunRequest

PRESENT = {field.name for kind in (Options, RunRequest) for field in dataclasses.fields(kind)}


def test_every_former_name_leads_to_a_present_one() -> None:
    assert not RENAMED.keys() & PRESENT
    assert {renamed.new for renamed in RENAMED.values()} <= PRESENT


def test_recorded_options_have_their_present_names_and_values() -> None:
    before = {"seed": 3, "restarts": 4, "elastic": None, "read_data": "once", "init_partial": True}
    after = {"seed": 3, "max_restarts": 4, "min_stages": None, "data_reader": "first"}
    assert migrated(before) == {**after, "init_strict": False}
    assert migrated(migrated(before)) == migrated(before)
    assert migrated({"read_data": "every"}) == {"data_reader": "every"}
    assert migrated({"checkpoint_every": None, "steps": None}) == {"steps": None}
    assert migrated({"checkpoint_every": "9"}) == {"checkpoint_every": "9"}


@pytest.mark.parametrize("value", [[1], {}, None, 1, 0.0])
def test_a_recorded_value_of_another_type_is_kept_for_the_reader_of_options(value: object) -> None:
    assert migrated({"init_partial": value}) == {"init_strict": value}


def test_a_place_that_lacks_the_present_option_does_not_name_it() -> None:
    reject_renamed("restarts", (), str)
    reject_renamed("seed", ["seed"], str)
    expected = "READ_DATA: this option was renamed; use DATA_READER, where once is now called first"
    with pytest.raises(UsageError, match=f"^{expected}$"):
        reject_renamed("read-data", ["data_reader"], lambda n: n.upper().replace("-", "_"))


@pytest.mark.parametrize(
    "name", ["batch_size", "batch-size", "train-batch-size", "batchsize", "bs"]
)
def test_the_size_of_a_batch_is_explained(name: str) -> None:
    expected = (
        f"^x: {name}: no such option; the batch is what data.. yields: change it there .micro"
    )
    with pytest.raises(UsageError, match=expected):
        reject_batch_size(name, ["microbatches"], str, "x: ")


def test_other_names_and_places_are_left_alone() -> None:
    reject_batch_size("batch-sampler", ["microbatches"], str)
    reject_batch_size("jobs", ["microbatches"], str)
    reject_batch_size("batch-size", ["json"], str)
