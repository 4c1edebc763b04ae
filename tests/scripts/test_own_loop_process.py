"""``pipeworker.Pipeline`` in a process of the user's, whose state it restores."""

from __future__ import annotations

import pytest
import torch

from support.real_jobs.ranks import Scripts, script
from support.real_jobs.sources import DROPOUT, JOB
from support.slow import slow


@slow
def test_the_state_of_the_process_is_restored(scripts: Scripts) -> None:
    """Random streams, signals, threads, descriptors and grad mode stay, over several jobs."""
    loop = """
        import gc, random, signal, threading
        def draw():
            return [torch.rand(()).item(), random.random()]
        torch.manual_seed(5); random.seed(5)
        drawn, before = [draw()], None
        for attempt in range(3):
            with torch.no_grad(), pipeworker.Pipeline(
                model, loss=loss, optimizer=optimizer, microbatches=4, run_dir=f"run-{attempt}",
                backend=os.environ["BACKEND"]
            ) as pipe:
                drawn.append(draw())
                pipe.step(next(data()))
                drawn.append(draw())
                pipe.evaluate(next(data()))
                assert not torch.is_grad_enabled()
            assert pipe.layers and pipe.run_dir.is_dir()  # they outlive the job
            del pipe
            gc.collect()
            left = (len(os.listdir("/proc/self/fd")), threading.active_count())
            assert before is None or max(left, before) == before, (before, left)
            before = left
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        report(drawn=drawn, threads=threading.active_count())
    """
    torch.manual_seed(5)
    expected = [torch.rand(()).item() for _ in range(7)]
    for stages, backend in ((1, "auto"), (2, "gloo"), (3, "auto")):
        ranks = scripts.start(script(DROPOUT, loop), stages, BACKEND=backend)
        ranks.succeed()
        for rank in range(stages):
            assert [drawn[0] for drawn in ranks.reported(rank)["drawn"]] == expected
            assert ranks.reported(rank)["threads"] == 1


@pytest.mark.parametrize("place", [pytest.param("environment", marks=slow), "group"])
def test_a_process_group_of_the_users_is_used_and_stays(scripts: Scripts, place: str) -> None:
    loop = """
        import torch.distributed as dist
        if os.environ.get("PLACE") == "group":  # it alone knows the ranks
            address = f"tcp://127.0.0.1:{os.environ.pop('MASTER_PORT')}"
            world = int(os.environ.pop("WORLD_SIZE"))
            dist.init_process_group("gloo", address, rank=int(os.environ.pop("RANK")),
                                    world_size=world)
            del os.environ["MASTER_ADDR"]
        else:
            dist.init_process_group("gloo")
        with pipeworker.Pipeline(
            model, loss=loss, optimizer=optimizer, microbatches=4, run_dir="run"
        ) as pipe:
            loss = torch.tensor(pipe.step(next(data())).loss)
            dist.all_reduce(loss)
        dist.barrier()
        dist.destroy_process_group()
        report(loss=loss.item())
    """
    ranks = scripts.start(script(JOB, loop), 2, PLACE=place)
    assert ranks.succeed()[0].summary["stages"] == 2
    assert ranks.reported(0) == ranks.reported(1)


def test_modules_of_the_users_have_no_leftovers(scripts: Scripts) -> None:
    """They are trained and have no leftovers; gradients they had before do not count."""
    loop = """
        def train():
            with pipeworker.Pipeline(
                net, loss=loss, optimizer=optimizer, microbatches=4, deferred_batch_norm=True,
                run_dir=f"run-{len(results)}"
            ) as pipe:
                results.append([pipe.step(batch).grad_norm for batch in data()])

        results = []
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        first = {key: value.clone() for key, value in net.state_dict().items()}
        for parameter in net.parameters():
            parameter.grad = torch.ones_like(parameter)
        train()
        assert net[1].track_running_stats and not net[1]._forward_pre_hooks
        assert net[1].num_batches_tracked == 6
        assert all(parameter.grad is None for parameter in net.parameters())
        net.load_state_dict(first)
        train()
        assert net[1].num_batches_tracked == 6
        assert results[0] == results[1]
    """
    scripts.start(script(JOB, loop), 1, alone=True).succeed()


def test_a_forked_child_takes_no_part_in_the_job(scripts: Scripts) -> None:
    """Its calls are errors; its end, inside the block or inside a call, is not the job's."""
    loop = """
        def in_child(act, status):
            if pid := os.fork():
                assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == status
            else:
                act()
                sys.exit(status)

        def attempt():
            batch = next(data())
            text = f"another process: process {os.getppid()} has forked this one; make all calls"
            for call, *arguments in (
                (pipe.__enter__,), (pipe.step, batch), (pipe.evaluate, batch),
                (pipe.predict, batch[0]), (pipe.end_epoch,), (pipe.save,), (pipe.load, "run"),
            ):
                try:
                    call(*arguments)
                except pipeworker.UsageError as error:
                    assert text in str(error), error
                else:
                    os._exit(9)
            pipe.close()

        def forking(output, target, loss=loss):
            if not pipe.steps_done:
                in_child(lambda: None, 4)
            return loss(output, target)

        with pipeworker.Pipeline(
            model, loss=forking, optimizer=optimizer, microbatches=1, run_dir="run"
        ) as pipe:
            pipe.step(next(data()))
            in_child(attempt, 0)
            in_child(lambda: 1 / 0, 1)
            report(step=pipe.step(next(data())).step)
    """
    ranks = scripts.start(script(JOB, loop), 1, alone=True)
    (run,) = ranks.succeed()
    assert ranks.reported(0) == {"step": 2}
    assert run.summary["status"] == "done"


def test_a_forked_process_of_multiprocessing_closes_its_pipeline(scripts: Scripts) -> None:
    """Its end runs no function of atexit."""
    loop = """
        import multiprocessing

        def train(name):
            global pipe  # so it is no garbage when the function ends
            pipe = pipeworker.Pipeline(model, loss=loss, optimizer=optimizer, run_dir=name)
            pipe.step(next(data()))
            if name == "raises":
                raise ValueError("of my own")
            if name == "exits":
                sys.exit()

        def status(name):
            process = multiprocessing.get_context("fork").Process(target=train, args=(name,))
            process.start()
            process.join()
            return json.loads(Path(name, "summary.json").read_text())["status"]

        report(status=[status("ends"), status("exits"), status("raises")])
    """
    ranks = scripts.start(script(JOB, loop), 1, alone=True)
    ranks.succeed()
    assert ranks.reported(0) == {"status": ["done", "done", "failed"]}
