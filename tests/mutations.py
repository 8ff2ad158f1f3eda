"""Break the process code on purpose, one place at a time, and see the test that guards it fail.

    python -m tests.mutations            # all of them, side by side two at a time
    python -m tests.mutations --list     # the table
    python -m tests.mutations --only 3,7

Each break is made in a private copy of the tree. A break that no longer applies (the text is not there any more) counts as a failure of
this script, so that the table cannot go stale; so does one that its test does not notice. The table is also in tests/README.md, and
tests/test_mutations.py holds the two together.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

_TIMEOUT_S = 120
"""Seconds for one test: a break may well make it hang, which is noticed too."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """One deliberate break.

    Attributes:
        what: the promise that is broken, in words.
        file: below ``rlm_kernel/``.
        old, new: the text that is replaced; it must occur.
        test: the test that notices, as pytest names it.
    """

    what: str
    file: str
    old: str
    new: str
    test: str


_SUPERVISOR = "tests/children/test_supervisor.py::"
_DEATHS = "tests/children/test_deaths.py::"
_REGISTRY = "tests/children/test_registry.py::"
_NURSERY = "tests/children/test_nursery.py::"

MUTATIONS = (
    Mutation(
        "what a child daemonized is killed with it",
        "children/nursery.py",
        "strangers = [pid for pid in posix.children_of_this_process() if pid not in self._by_pid]",
        "strangers: list[int] = []",
        _SUPERVISOR + "test_what_a_child_started_is_gone_when_it_has_ended",
    ),
    Mutation(
        "a child is a subreaper, so its daemons are not taken for another's",
        "children/forking.py",
        "    posix.become_subreaper()\n",
        "",
        _SUPERVISOR + "test_a_daemon_goes_with_its_own_child_and_not_with_another_one",
    ),
    Mutation(
        "children die with a nursery that was killed",
        "children/forking.py",
        "if posix.set_parent_death_signal(signal.SIGKILL) and os.getppid() != nursery_pid:",
        "if os.getppid() != nursery_pid:",
        _NURSERY + "test_a_nursery_killed_outright_takes_its_children_along",
    ),
    Mutation(
        "the nursery watches the kernel itself, not only its channel",
        "children/nursery.py",
        "            return self._kernel_pidfd in ready",
        "            return False",
        _DEATHS + "test_a_copy_of_the_root_that_holds_its_sockets_keeps_no_child_alive",
    ),
    Mutation(
        "a stop ends in SIGKILL",
        "children/nursery.py",
        "_SIGNAL_OF_STEP = {Step.ASK: signal.SIGINT, Step.TERMINATE: signal.SIGTERM, Step.KILL: signal.SIGKILL}",
        "_SIGNAL_OF_STEP = {Step.ASK: signal.SIGINT, Step.TERMINATE: signal.SIGTERM, Step.KILL: signal.SIGTERM}",
        _NURSERY + "test_the_steps_follow_each_other_side_by_side_for_all",
    ),
    Mutation(
        "a child is asked before it is killed, and its handlers stand in time",
        "children/forking.py",
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_SIGNALS)\n",
        "",
        _SUPERVISOR + "test_a_child_that_cooperates_runs_its_finally_blocks_and_costs_no_grace",
    ),
    Mutation(
        "the supervisor does without a nursery that hangs",
        "children/stopping.py",
        "        self._kill_directly(targets)\n",
        "        return\n",
        _DEATHS + "test_a_nursery_that_hangs_does_not_keep_a_stop_from_confirming_in_time",
    ),
    Mutation(
        "an answer that is still in the socket counts, though the exit was seen first",
        "children/reactor.py",
        "                self._read_channel(message.id)\n                self._read_log(message.id)\n                self._release",
        "                self._release",
        "tests/children/test_reactor.py::test_an_answer_that_is_still_in_the_socket_when_the_exit_is_reported_counts",
    ),
    Mutation(
        "a parent takes its descendants along",
        "children/registry.py",
        "        self.stop(record.children, graces)\n",
        "        pass\n",
        _SUPERVISOR + "test_a_parent_that_answers_without_waiting_takes_its_children_with_it",
    ),
    Mutation(
        "the queue is first in, first out",
        "children/registry.py",
        "self.apply(self._queue.popleft(), Event.SLOT)",
        "self.apply(self._queue.pop(), Event.SLOT)",
        _REGISTRY + "test_children_start_first_in_first_out",
    ),
    Mutation(
        "a parent that polls does not starve its child of the only slot",
        "children/registry.py",
        "(self._has_free_slot() or self._is_stuck())",
        "self._has_free_slot()",
        _SUPERVISOR + "test_a_parent_that_polls_finishes_with_one_slot",
    ),
    Mutation(
        "an answer after the stop does not turn a cancelled child into a completed one",
        "children/registry.py",
        "if not was_ended and record.outcome is None and event in DECIDES:",
        "if not was_ended and event in DECIDES:",
        _SUPERVISOR + "test_an_answer_that_comes_after_the_stop_is_kept_and_the_child_stays_cancelled",
    ),
    Mutation(
        "what outlived a killed nursery is found by its marker",
        "children/reactor.py",
        "survivors = sweep.kill_marked(nursery.marker, give_up_at, sessions=leaders)",
        "survivors = ()",
        _DEATHS + "test_a_nursery_killed_outright_fails_its_runs_and_the_next_start_works",
    ),
    Mutation(
        "each child is the leader of a session of its own",
        "children/forking.py",
        "    os.setsid()\n",
        "",
        _SUPERVISOR + "test_a_child_is_alone_with_its_channel_in_a_session_of_its_own",
    ),
    Mutation(
        "a batch beyond a limit starts nothing at all",
        "children/registry.py",
        "        self._check_limits(len(specs), caller)",
        "        self._check_limits(1, caller)",
        _SUPERVISOR + "test_a_batch_beyond_a_limit_starts_nothing_and_closes_its_descriptors",
    ),
    Mutation(
        "secrets are gone before code of the model's runs",
        "session/child_run.py",
        "    remove_secrets(start.secret_environ)\n",
        "",
        "tests/session/test_child_run.py",
    ),
    Mutation(
        "a verb after a failed one does not run the graces again",
        "session/lifecycle.py",
        ".from_kill()",
        "",
        "tests/session/test_lifecycle.py",
    ),
    Mutation(
        "an interrupt is acknowledged only when every exit is confirmed",
        "jupyter/control.py",
        "            report = await asyncio.wrap_future(run_off_thread(lambda: self.rlm.close(begun=True)))",
        "            run_off_thread(lambda: self.rlm.close(begun=True))\n            report = CleanupReport('close')",
        "tests/end_to_end/test_interrupting.py::test_no_child_is_left_when_interrupt_and_cell_are_acknowledged",
    ),
    Mutation(
        "a cell that finalizes is acknowledged only when its children are gone",
        "jupyter/attachment.py",
        "                await self._confirmed(run_off_thread(self.rlm.finalize), on_main)",
        "                run_off_thread(self.rlm.finalize)",
        "tests/end_to_end/test_finalizing.py::test_children_are_gone_before_the_reply_of_the_cell_that_finalizes",
    ),
    Mutation(
        "a shutdown is acknowledged only when every exit is confirmed",
        "jupyter/control.py",
        '                await asyncio.wrap_future(self._begin_shutdown("reset" if restart else "finalize"))',
        '                self._begin_shutdown("reset" if restart else "finalize")',
        "tests/end_to_end/test_ending.py::test_no_child_is_left_when_a_shutdown_is_acknowledged",
    ),
    Mutation(
        "in a stock kernel, a cell that ends in an interrupt is acknowledged only when its children are gone",
        "jupyter/attachment.py",
        "            closing = run_off_thread(self.rlm.close)",
        "            run_off_thread(self.rlm.close)",
        "tests/end_to_end/test_extension.py::test_a_cell_that_ends_in_an_interrupt_has_stopped_the_children_before_its_reply",
    ),
    Mutation(
        "leaving IPython stops the children before the interpreter waits for threads",
        "jupyter/terminal.py",
        "            self.shell._atexit_once = self._leave_shell  # type: ignore[method-assign]",
        "            pass",
        "tests/end_to_end/test_extension_terminal.py::test_ctrl_d_stops_a_child_for_which_a_thread_of_the_users_waits",
    ),
    Mutation(
        "a kernel with living children shows a culling server that it is not idle",
        "jupyter/activity.py",
        "                self._try_to_tell(number)\n",
        "",
        "tests/end_to_end/test_server.py::test_a_kernel_is_not_culled_while_a_child_lives_and_is_culled_when_it_has_ended",
    ),
    Mutation(
        "the provisioner is done with a killed kernel only when nothing of it is left",
        "jupyter/provisioner.py",
        "            await self._wait_for_remains(pidfds)\n",
        "            pass\n",
        "tests/end_to_end/test_server_provisioner.py::test_a_killed_kernel_is_done_with_only_when_nothing_of_it_is_left",
    ),
    Mutation(
        "an answer that does not fit its schema is not taken",
        "session/structured.py",
        "            problems = self._problems(reading)\n",
        "            problems: list[str] = []\n",
        "tests/session/test_structured.py",
    ),
    Mutation(
        "every execute_reply carries the state of the episode",
        "jupyter/attachment.py",
        '            finished["rlm"] = observe(self.rlm)\n',
        "            pass\n",
        "tests/end_to_end/test_finalizing.py::test_after_the_answer_cells_run_and_children_are_refused_until_a_reset",
    ),
    Mutation(
        "output of a model-driven cell counts",
        "jupyter/attachment.py",
        " if is_model_driven(cell_meta) else None",
        " if False else None",
        "tests/end_to_end/test_harness.py",
    ),
    Mutation(
        "with a killed nursery, children of children have failed and are not taken for cancelled",
        "children/reactor.py",
        "                self._owner.on_broken(child_id, error)\n        for child_id, port",
        "        for child_id, port",
        "tests/end_to_end/test_events.py",
    ),
    Mutation(
        "an interrupt of a model call is shown without the frames of its client",
        "children/supervisor.py",
        "        interrupt = error.with_traceback(None)",
        "        interrupt = error",
        "tests/end_to_end/test_interrupting.py::test_no_child_is_left_when_interrupt_and_cell_are_acknowledged",
    ),
    Mutation(
        "a thread that code starts prints for the environment of that code",
        "environment/routing.py",
        '            if scope is not None and not thread.name.startswith("rlm-"):',
        "            if False:",
        "tests/environment/test_thread_shell.py",
    ),
    Mutation(
        "llama.cpp is asked for its reply piece by piece",
        "clients/specs.py",
        '_local(8080, "LLAMACPP", stream=True)',
        '_local(8080, "LLAMACPP")',
        "tests/clients/test_openai_compatible.py::test_a_llamacpp_spec_streams",
    ),
    Mutation(
        "a live table ends in the state after the stop that its cell led to",
        "jupyter/attachment.py",
        "        self.cells.end_views()\n",
        "",
        "tests/end_to_end/test_views.py::test_an_interrupt_ends_the_table_with_the_children_stopped",
    ),
    Mutation(
        "a view's messages stay with the cell that waits",
        "jupyter/views/surfaces.py",
        'context.run(publisher.set_thread_parent, {"header": header})',
        "pass",
        "tests/jupyter/views/test_live.py",
    ),
    Mutation(
        "however much stirs, a view is drawn once in an interval",
        "jupyter/views/live.py",
        "if self._over.acquire(timeout=self._interval_s):",
        "if self._over.acquire(blocking=False):",
        "tests/jupyter/views/test_live.py",
    ),
    Mutation(
        "a run in the notebook's namespace stops its own children and no others",
        "session/root_run.py",
        "        self.started += [status.id for status in statuses]\n",
        "",
        "tests/end_to_end/test_cell_magic.py::test_a_run_stops_its_own_children_and_no_others",
    ),
    Mutation(
        "a model's words cannot act on the page",
        "jupyter/views/base.py",
        "return html.escape(visible(text))",
        "return visible(text)",
        "tests/jupyter/views/test_children.py",
    ),
    Mutation(
        "a request to stop is repeated for a child that was about to enter a system call",
        "children/nursery.py",
        "child.ask_again_at = [now + pause_s for pause_s in _ASK_AGAIN_S]",
        "child.ask_again_at = []",
        _NURSERY + "test_the_request_to_stop_is_repeated_for_a_child_that_was_about_to_enter_a_system_call",
    ),
    Mutation(
        "usage is kept by model",
        "session/models.py",
        "count_by_model(self._usage_by_model, name, usage)",
        'count_by_model(self._usage_by_model, "", usage)',
        "tests/session/test_limits.py::test_usage_by_model_adds_up_to_the_episodes_to_the_token",
    ),
)


def table() -> str:
    """Return the table as Markdown."""
    rows = [f"| {i} | {m.what} | `{m.file}` | `{m.test}` |" for i, m in enumerate(MUTATIONS, 1)]
    return "\n".join(["| | promise that is broken | where | test that notices |", "|---|---|---|---|", *rows])


def applies(mutation: Mutation) -> bool:
    """Tell whether the text that a break replaces is still there, once."""
    return (ROOT / "rlm_kernel" / mutation.file).read_text("utf-8").count(mutation.old) == 1


def run(mutation: Mutation) -> tuple[bool, str]:
    """Make one break in a private copy and run its test.

    Returns:
        whether the test noticed, and what pytest said last.
    """
    if not applies(mutation):
        return False, "does not apply any more: the text to replace is not there exactly once"
    with tempfile.TemporaryDirectory(prefix="rlm-mutation-") as folder:
        copy = Path(folder)
        for name in ("rlm_kernel", "tests", "kernelspec"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "rlm.py"):
            shutil.copy(ROOT / name, copy / name)
        target = copy / "rlm_kernel" / mutation.file
        target.write_text(target.read_text("utf-8").replace(mutation.old, mutation.new), "utf-8")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-n",
            "0",
            "--timeout=60",
            mutation.test,
        ]
        try:
            done = subprocess.run(
                command,
                cwd=copy,
                env={**os.environ, "PYTHONPATH": folder},
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return True, "the test hung, which is noticed"
    last = (done.stdout.strip().splitlines() or ["(nothing printed)"])[-1]
    return done.returncode == 1, last


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the table")
    parser.add_argument("--only", help="numbers of the table, separated by commas")
    args = parser.parse_args()
    if args.list:
        print(table())
        return 0
    chosen = set(map(int, args.only.split(","))) if args.only else set(range(1, len(MUTATIONS) + 1))
    numbered = [(i, m) for i, m in enumerate(MUTATIONS, 1) if i in chosen]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda entry: run(entry[1]), numbered))
    missed = 0
    for (number, mutation), (noticed, last) in zip(numbered, results, strict=True):
        missed += not noticed
        print(f"{'noticed' if noticed else 'MISSED '} {number:2d}. {mutation.what}: {last}")
    print(f"{len(numbered) - missed} of {len(numbered)} breaks were noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
