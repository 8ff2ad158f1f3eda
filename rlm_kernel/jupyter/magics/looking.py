"""Commands that look: at the session, at its children, and at what is kept of them."""

from __future__ import annotations

import contextlib
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Sequence

from IPython.core.magic_arguments import argument

from rlm_kernel.errors import StaleHandleError
from rlm_kernel.jupyter import export_command
from rlm_kernel.jupyter.magics.commands import Here, command, count, seconds
from rlm_kernel.jupyter.magics.naming import find_child, find_children, id_for_name
from rlm_kernel.jupyter.views.base import Table, View, shorten
from rlm_kernel.jupyter.views.children import status_table
from rlm_kernel.session.session import RLMSession
from rlm_kernel.values import ChildStatus

_TEXT = 400
"""Characters of a task, an answer or an error that ``%rlm status ID`` shows."""

_SHOWN = 40
"""Children that ``%rlm status`` shows of its own accord, besides those that have not ended."""


def summary(session: RLMSession) -> Table:
    """Show how it stands with the session."""
    statuses = session.supervisor.status()
    live = sum(not status.done for status in statuses)
    final = session.final_answer
    usage = session.usage
    rows = [
        ("model", session.model_name or "none: type `%rlm model demo` to try things out, or `%rlm model openai/...`"),
        ("episode", session.episode_id),
        ("children", f"{live} live, {len(statuses)} started (limit {session.settings['max_children_total']})"),
        ("usage", f"{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens"),
        ("final answer", "none yet" if final is None else final.text[:200]),
        ("shared contexts", f"{len(session.held)} held, {session.held.total_bytes:,} bytes"),
        ("files", str(session.run_folder or "none yet")),
    ]
    dropped = session.supervisor.observers.dropped
    if dropped:
        rows.append(("observers", f"{dropped} notifications were dropped: a callback is too slow, or blocked"))
    if session.cleanup_failure is not None:
        rows.append(("cleanup", str(session.cleanup_failure)))
    return Table("RLM session (`%rlm help` lists the commands)", ("", ""), tuple(rows))


@command(
    "status",
    argument(
        "ids", nargs="*", metavar="ID", help="ids or names of children (of one, all is shown); none: the episode's"
    ),
    argument("--live", action="store_true", help="only those that have not ended"),
    argument("--all", action="store_true", help="all, where without it only the latest of many are shown"),
)
def status(here: Here, args: Namespace) -> View:
    """Show children in a table: state, time, steps, tokens."""
    session = here.session
    if args.ids:
        found = find_children(session, args.ids)
        wanted = _wanted(found, args.live)
        if len(found) == 1 and wanted:
            return _details(wanted[0])
        named = f"{'child' if len(found) == 1 else 'children'} {', '.join(child.id for child in found)}"
        return status_table(wanted, named if wanted else f"{named}: ended already")
    statuses = session.supervisor.status()
    wanted = _wanted(statuses, args.live)
    if not wanted:
        return Table(_nothing(session, statuses), (), ())
    latest = {child.id for child in wanted[-_SHOWN:]}
    shown = wanted if args.all else [child for child in wanted if not child.done or child.id in latest]
    left = len(wanted) - len(shown)
    more = f"; {left} that have ended are left out, `%rlm status --all` shows them" if left else ""
    return status_table(shown, f"{_count(wanted)} in episode {session.episode_id}{more}")


@command("tree", argument("ids", nargs="*", metavar="ID", help="ids or names: show what is below these children only"))
def tree(here: Here, args: Namespace) -> View:
    """Show who started whom, with states and tokens."""
    session = here.session
    found = find_children(session, args.ids)
    statuses = session.supervisor.status()
    if not statuses:
        return Table(_nothing(session, statuses), (), ())
    from rlm_kernel.jupyter.views.tree import tree_view

    shown = _below(statuses, {child.id for child in found}) if found else statuses
    return tree_view(shown, title=f"{_count(shown)} in episode {session.episode_id}")


@command(
    "timeline",
    argument("ids", nargs="*", metavar="ID", help="ids or names: these children only"),
    argument("--text", action="store_true", help="as text, also where there could be a picture"),
)
def timeline(here: Here, args: Namespace) -> View:
    """Show who ran, waited and was queued when: as a picture if matplotlib is installed, else as text."""
    ids = [child.id for child in find_children(here.session, args.ids)]
    from rlm_kernel.jupyter.views.timeline import timeline_view

    return timeline_view(here.session, ids, text_only=args.text)


@command(
    "cost",
    argument(
        "--price",
        action="append",
        metavar="MODEL=IN/OUT",
        help="dollars per million prompt and completion tokens of a model; may be given for several",
    ),
    argument("--litellm", action="store_true", help="take prices from LiteLLM's list, which takes seconds to load"),
)
def cost(here: Here, args: Namespace) -> View:
    """Show model calls and tokens by model and by run, and what they cost if there are prices."""
    from rlm_kernel.jupyter.views.costs import cost_view

    return cost_view(here.session, prices=args.price, litellm=args.litellm)


@command(
    "logs",
    argument("id", metavar="ID", help="id or name of a child; EPISODE/ID for a run of an earlier episode"),
    argument("-n", "--lines", type=count, metavar="N", help="begin with the last N lines"),
    argument("-f", "--follow", action="store_true", help="go on with what is written, until the child has ended"),
    argument("--for", dest="for_s", type=seconds, metavar="S", help="follow, but for S seconds at most"),
)
def logs(here: Here, args: Namespace) -> None:
    """Show what a child has written to its standard output and error."""
    from rlm_kernel.jupyter.logs import show_log

    session = here.session
    if "/" not in args.id:
        with contextlib.suppress(StaleHandleError):  # of an earlier episode: its log is still there
            args.id = find_child(session, args.id).id
    show_log(session, here.shell, args.id, follow=args.follow, lines=args.lines, timeout_s=args.for_s)


@command("export")
def export(here: Here, args: Namespace) -> None:
    """Write a run to a notebook, which runs again, or to a trajectory file.

    ID is a child, root (the latest run of %%rlm), an episode, or EPISODE/RUN."""
    session = here.session
    if all(child.id != args.id for child in session.supervisor.status()):
        args.id = id_for_name(session, args.id) or args.id
    print(export_command.export_here(args, session))


export_command.add_arguments(export.parser)


def _details(child: ChildStatus) -> Table:
    """Show one child, with what a row has no room for."""
    usage = child.usage
    gone = "" if child.pid is None or not child.exited else f", gone (exit code {child.exit_code})"
    rows = (
        ("state", str(child.state)),
        ("name", child.name if child.name != child.id else ""),
        ("started by", child.parent_id or "the notebook"),
        ("model", child.model or ""),
        ("elapsed", f"{child.elapsed_s:.1f} s"),
        ("last activity", "" if child.done or child.last_activity_s is None else f"{child.last_activity_s:.1f} s ago"),
        ("steps", str(child.iterations)),
        ("usage", f"{usage.calls} calls, {usage.prompt_tokens} + {usage.completion_tokens} tokens"),
        ("messages", f"{child.messages_seen} of {child.messages_sent} seen" if child.messages_sent else ""),
        ("process", "" if child.pid is None else f"pid {child.pid}{gone}"),
        ("task", shorten(child.prompt_preview, _TEXT)),
        ("answer", shorten(child.result or "", _TEXT)),
        ("error", shorten(child.error or "", _TEXT)),
        ("trajectory", child.trajectory_path or ""),
    )
    return Table(f"child {child.id}", ("", ""), tuple(row for row in rows if row[1]))


def _wanted(statuses: Iterable[ChildStatus], live: bool) -> list[ChildStatus]:
    return [child for child in statuses if not (live and child.done)]


def _below(statuses: Sequence[ChildStatus], tops: set[str]) -> list[ChildStatus]:
    """Return children and their descendants. A parent comes before its children, as they were started."""
    wanted = set(tops)
    for child in statuses:
        if child.parent_id in wanted:
            wanted.add(child.id)
    return [child for child in statuses if child.id in wanted]


def _count(statuses: Sequence[ChildStatus]) -> str:
    states = ", ".join(f"{number} {state}" for state, number in Counter(str(s.state) for s in statuses).items())
    return f"{len(statuses)} {'child' if len(statuses) == 1 else 'children'} ({states})"


def _nothing(session: RLMSession, statuses: Sequence[ChildStatus]) -> str:
    if statuses:
        return f"no live children in episode {session.episode_id}: all {len(statuses)} have ended"
    return f"no children in episode {session.episode_id} yet; rlm_query(prompt, blocking=False) starts one"
