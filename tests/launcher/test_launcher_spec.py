"""Tests of a job's specification."""

from __future__ import annotations

import pytest

from launcher.spec import JobSpec, assign_ranks, job_name
from pipeworker.errors import UsageError


def test_neighbouring_ranks_share_a_host_while_it_has_places() -> None:
    assert assign_ranks([2, 3, 1], 5) == [0, 0, 1, 1, 1]
    assert assign_ranks([0, 2], 2) == [1, 1]
    with pytest.raises(UsageError, match="3 workers, and the hosts have places for 2"):
        assign_ranks([1, 1], 3)


@pytest.mark.parametrize(
    ("stem", "name"),
    [("My Job", "my-job"), ("7b_chat", "job-7b-chat"), ("ä", "job"), (50 * "a", 40 * "a")],
)
def test_a_file_names_its_job_as_clusters_accept_it(stem: str, name: str) -> None:
    assert job_name(stem) == name


def test_the_fullest_node_counts() -> None:
    spec = JobSpec("job", "/job.py", workers=6, nodes=4, replicas=2, threads=3)
    assert (spec.stages, spec.workers_per_node, spec.cores_per_node) == (3, 2, 6)
    with pytest.raises(UsageError, match="--nodes 7: must be 1 to the 6 workers"):
        JobSpec("job", "/job.py", workers=6, nodes=7)
    with pytest.raises(UsageError, match=r"--nodes 2: must be 1 to the 1 worker\b"):
        JobSpec("job", "/job.py", workers=1, nodes=2)
