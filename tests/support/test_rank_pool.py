"""Tests of the test infrastructure. A pool that loses an error would hide failures of all tests."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.models import QUIET
from tests.support.rank_pool import RankContext, RankFailure, RankPool
from tests.support.scripts import RunScript, ScriptTimeout, StartScript


def describe(context: RankContext, word: str, mark: str = "") -> tuple[int, int, str, bool]:
    return context.rank, context.world_size, word + mark, context.tmp == Path.cwd()


def sum_of_ranks(context: RankContext) -> torch.Tensor:
    environment = context.environment
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{environment.main_address}:{environment.main_port}",
        rank=environment.global_rank(),
        world_size=environment.world_size(),
    )
    tensor = torch.full((3,), float(context.rank))
    dist.all_reduce(tensor)
    return tensor


def train_with_lightning(context: RankContext) -> tuple[int, list[float], bool]:
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel

    torch.manual_seed(0)
    model = BoringModel()
    trainer = Trainer(
        accelerator="cpu",
        devices=context.world_size,
        strategy="ddp",
        plugins=[context.environment],
        max_steps=2,
        limit_val_batches=0,
        **QUIET,
    )
    trainer.fit(model)
    return trainer.global_rank, model.layer.weight.flatten().tolist(), trainer.is_global_zero


def state_of_process(context: RankContext) -> dict[str, object]:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    return {
        "group": dist.is_initialized(),
        "dtype": torch.get_default_dtype(),
        "grad": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "swap": torch.__future__.get_swap_module_params_on_conversion(),
        "rank_zero_only": rank_zero_only.rank,
        "environ": dict(os.environ),
        "draws": (torch.rand(1).item(), random.random()),
        "pid": os.getpid(),
    }


def disturb_process(context: RankContext) -> str:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    context.init_process_group()
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    torch.__future__.set_swap_module_params_on_conversion(True)
    rank_zero_only.rank = 7
    os.environ["DLRES_LEFT_BEHIND"] = "1"
    del os.environ["OMP_NUM_THREADS"]
    elsewhere = context.tmp / f"elsewhere{context.rank}"
    elsewhere.mkdir()
    os.chdir(elsewhere)
    return str(context.tmp)


def leave_a_thread(context: RankContext) -> int:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return os.getpid()


def fail_on_rank_one(context: RankContext) -> int:
    print(f"printed by rank {context.rank}")
    if context.rank == 1:
        raise KeyError("the reason")
    return os.getpid()


def fail_with_rank(context: RankContext) -> int:
    print(f"printed by rank {context.rank}")
    if context.rank == 0:
        return os.getpid()
    raise ValueError(f"rank {context.rank}")


def hang(context: RankContext) -> None:
    # What Lightning does at the end of `fit`.
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    if context.rank == 0:
        wait_for_godot()
    if context.rank == 1:
        hold_the_interpreter_lock()


def wait_for_godot() -> None:
    threading.Event().wait()


def hold_the_interpreter_lock() -> None:
    ctypes.PyDLL(None).pause()


def die_on_rank_one(context: RankContext) -> int:
    if context.rank == 1:
        print("last words")
        os._exit(3)
    return os.getpid()


def fail_to_bind_once(context: RankContext, marker: str) -> int:
    if not Path(marker).exists():
        Path(marker).touch()
        raise OSError(98, "Address already in use")
    return context.port


def process_id(context: RankContext) -> int:
    return os.getpid()


def test_results_come_in_rank_order(pool: RankPool) -> None:
    results = pool.run(describe, 2, "a", mark="b")
    assert results == [(0, 2, "ab", True), (1, 2, "ab", True)]


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_form_a_process_group(pool: RankPool, world_size: int) -> None:
    for result in pool.run(sum_of_ranks, world_size):
        assert torch.equal(result, torch.full((3,), float(sum(range(world_size)))))


def test_lightning_trains_in_the_pool(pool: RankPool) -> None:
    first, second = pool.run(train_with_lightning, 2)
    assert (first[0], second[0]) == (0, 1)
    assert first[1] == second[1]
    assert (first[2], second[2]) == (True, False)


def test_a_job_leaves_nothing_to_the_next(pool: RankPool) -> None:
    before = pool.run(state_of_process, 2)
    tmp, _ = pool.run(disturb_process, 2)
    after = pool.run(state_of_process, 2)
    assert after == before
    assert after[0]["draws"] != after[1]["draws"]
    assert not Path(tmp).exists()


def test_functions_that_a_rank_cannot_import_are_refused(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="top level of the test module"):
        pool.run(lambda context: None, 1)
    with pytest.raises(ValueError, match="world_size must be 1 to 4, got 5"):
        pool.run(process_id, 5)


def test_a_taken_port_is_tried_once_more(pool: RankPool, tmp_path: Path) -> None:
    (port,) = pool.run(fail_to_bind_once, 1, str(tmp_path / "tried"), keep=True)
    assert port > 0


def test_an_error_names_rank_and_traceback(pool: RankPool) -> None:
    before = pool.run(process_id, 2)
    with pytest.raises(RankFailure) as failure:
        pool.run(fail_on_rank_one, 2, keep=True)
    assert failure.value.errors == {1: ("KeyError", "'the reason'")}
    message = str(failure.value)
    assert (
        "1 of 2 ranks failed in tests.support.test_rank_pool.fail_on_rank_one: rank 1 (KeyError)"
        in message
    )
    assert 'raise KeyError("the reason")' in message
    assert "printed by rank 1" in message
    assert pool.run(process_id, 2) == before


def test_a_rank_whose_threads_outlive_a_job_is_replaced(pool: RankPool) -> None:
    (before,) = pool.run(process_id, 1)
    assert pool.run(leave_a_thread, 1) == [before]
    assert pool.run(process_id, 1) != [before]


def test_expected_errors_are_outcomes(pool: RankPool) -> None:
    zero, one, two = pool.run_expecting_errors(fail_with_rank, 3, keep=True)
    assert (zero.error_type, one.error_type, two.error_type) == (None, "ValueError", "ValueError")
    assert (one.error_message, two.error_message) == ("rank 1", "rank 2")
    assert zero.value > 0
    assert "in fail_with_rank" in one.traceback
    assert [outcome.output for outcome in (zero, one, two)] == [
        f"printed by rank {rank}\n" for rank in range(3)
    ]


def test_a_hanging_rank_shows_its_stack_and_a_dying_one_its_status(pool: RankPool) -> None:
    # Both in one test, because each costs fresh processes.
    died = pool.run_expecting_errors(die_on_rank_one, 2, keep=True)
    assert (died[1].error_type, died[1].error_message) == ("RankDied", "exited with status 3")
    assert died[1].output == "last words\n"

    before = pool.run(process_id, 3)
    assert before[0] == died[0].value
    with pytest.raises(RankFailure) as failure:
        pool.run(hang, 3, timeout=2.0)
    late = ("RankTimeout", "still running after 2 s")
    assert failure.value.errors == {0: late, 1: late}
    assert "in wait_for_godot" in str(failure.value)
    assert "in hold_the_interpreter_lock" in str(failure.value)
    assert not set(pool.run(process_id, 2)) & set(before)


@pytest.mark.parametrize("thread", [pytest.param("main", marks=pytest.mark.exhaustive), "other"])
def test_ranks_end_with_their_parent(start_script: StartScript, thread: str) -> None:
    # Started by another thread, which ends before they do, they have only the pipe to tell them.
    script = start_script(
        """
        import sys, threading
        from pathlib import Path
        from tests.support.rank_pool import RankPool

        pool = RankPool(Path.cwd())
        if sys.argv[1] == "main":
            pool.run(id, 1)
        else:
            starter = threading.Thread(target=pool.run, args=(id, 1))
            starter.start()
            starter.join()
        print("started")
        threading.Event().wait()
        """,
        thread,
    )
    script.wait_for_line("started")
    fork_server_and_rank = 2
    assert len(script.children()) == fork_server_and_rank
    os.kill(script.pid, signal.SIGKILL)
    script.wait_for_no_children()


def test_run_script_returns_status_and_output(run_script: RunScript, tmp_path: Path) -> None:
    source = """
        import os, sys
        print(sys.argv[1:], os.environ["GREETING"], "HOME" in os.environ, os.getcwd())
        sys.exit("to stderr")
    """
    result = run_script(source, 1, "two", env={"GREETING": "hello", "HOME": None})
    assert result.returncode == 1
    assert result.output == f"['1', 'two'] hello False {tmp_path}\nto stderr\n"


def test_a_script_past_its_deadline_shows_the_stacks_of_its_tree(start_script: StartScript) -> None:
    script = start_script(
        """
        import subprocess, sys, threading

        def wait_in_parent():
            print("parent waits")
            threading.Event().wait()

        def wait_in_child():
            print("child waits")
            threading.Event().wait()

        if sys.argv[1:] == ["child"]:
            wait_in_child()
        subprocess.Popen([sys.executable, __file__, "child"], start_new_session=True)
        wait_in_parent()
        """
    )
    script.wait_for_line("child waits")
    script.wait_for_line("parent waits")
    with pytest.raises(ScriptTimeout) as failure:
        script.wait(timeout=0.5)
    assert "in wait_in_parent" in str(failure.value)
    assert "in wait_in_child" in str(failure.value)
    assert script.children() == []


def test_a_script_tree_can_be_watched_and_killed(start_script: StartScript) -> None:
    script = start_script(
        """
        import os, subprocess, sys
        command = "import os, threading; print('child', os.getpid()); threading.Event().wait()"
        subprocess.Popen([sys.executable, "-c", command], start_new_session=True)
        subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"])
        """
    )
    child = int(script.wait_for_line(r"child (\d+)").group(1))
    assert script.wait() == 0
    assert child in script.children()
    script.kill_tree()
    assert script.children() == []
    with pytest.raises(AssertionError, match="no line matched 'never'"):
        script.wait_for_line("never")
