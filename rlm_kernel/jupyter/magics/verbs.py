"""Commands that act: steer and stop children, and end an episode."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

from IPython.core.magic_arguments import argument

from rlm_kernel.errors import ChildCleanupError
from rlm_kernel.jupyter.magics.commands import Here, command, seconds
from rlm_kernel.jupyter.magics.naming import find_child, find_children
from rlm_kernel.session.handles import check_message
from rlm_kernel.session.offthread import run_off_thread, wait_here
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import CleanupReport


@command(
    "cancel",
    argument("ids", nargs="+", metavar="ID", help="ids or names of children"),
    argument("--grace", type=seconds, metavar="S", help="seconds for the cooperative stop, instead of the configured"),
)
def cancel(here: Here, args: Namespace) -> None:
    """Stop children and their descendants; returns when their processes have exited. Others run on."""
    session = here.session
    children = find_children(session, args.ids)
    live = [child for child in children if not child.done]
    for child in children:
        if child.done:
            print(f"{child.id} had ended already: {child.state}")
    if not live:
        return
    graces = session.settings.bounds().graces
    if args.grace is not None:
        graces = replace(graces, shutdown_s=args.grace)
    report = session.supervisor.stop("cancel", graces, [(child.id, None) for child in live])
    if not report.ok:
        raise ChildCleanupError(report.summary(), report.survivors, report)
    print(report.summary())


@command(
    "send",
    argument("id", metavar="ID", help="id or name of a child"),
    argument("text", metavar="TEXT", help="the message: the rest of the line as it is"),
    tail="text",
)
def send(here: Here, args: Namespace) -> None:
    """Send a child's model a message, which it sees before its next call."""
    child = find_child(here.session, args.id)
    status = here.session.supervisor.send((child.id, None), check_message(args.text))
    print(
        f"{status.id}: message {status.messages_sent} sent; its model sees it before its next call "
        f"({status.messages_seen} seen so far)"
    )


@command("close")
def close(here: Here, args: Namespace) -> None:
    """Stop the children; variables, results and handles stay usable, and new children may be started."""
    _run(here.session, here.session.close)
    failure = here.session.cleanup_failure
    if failure is not None:
        print(failure)


@command("reset")
def reset(here: Here, args: Namespace) -> None:
    """Stop the children and begin a new episode. Your variables stay; only `context` and `answer` are new."""
    session = here.session
    failure = session.cleanup_failure
    _run(session, session.reset)
    _raise_failure(session)
    if failure is None:
        print(f"new episode {session.episode_id}")


@command(
    "cleanup",
    argument("--abandon", action="store_true", help="go on without the processes whose exit cannot be confirmed"),
)
def cleanup(here: Here, args: Namespace) -> None:
    """Try again to confirm the exit of processes that an earlier stop could not confirm."""
    session = here.session
    if args.abandon:
        failure = session.lifecycle.abandon()
        print("nothing to abandon" if failure is None else f"abandoned pid {', '.join(map(str, failure.survivors))}")
        return
    _run(session, session.cleanup)
    _raise_failure(session)


def _run(session: RLMSession, verb: Callable[[], CleanupReport]) -> None:
    report = wait_here(run_off_thread(verb), session.lifecycle.hasten)
    print(report.summary())


def _raise_failure(session: RLMSession) -> None:
    failure = session.cleanup_failure
    if failure is not None:
        raise failure
