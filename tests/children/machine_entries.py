"""What children run in the state machine, beyond what `entries` has."""

from __future__ import annotations

import json
import time

from rlm_kernel.children.worker import Link
from rlm_kernel.wire import messages as m
from tests.children.entries import Context, pause, spawn, summary, wait
from tests.children.entries import run as run_plain_entry


def run(link: Link, start: m.Start) -> str:
    """Run what this module has under the name, else what `entries` has."""
    task = json.loads(start.task)
    own = globals().get("do_" + task["do"])
    return run_plain_entry(link, start) if own is None else str(own(Context(link, start, task)))


def do_listen(c: Context) -> str:
    """Answer with the first message that is sent to this run."""
    c.report()
    while not (messages := c.link.take_messages()):
        time.sleep(0.005)  # what a model's code does between two calls
    return messages[0]


def do_cancel_one_and_wait_for_any(c: Context) -> str:
    """Start three children; cancel one that would never end, wait for whichever ends first, leave the third to our end."""
    tasks = [{"do": "pause"}, {"do": "echo", "text": "first"}, {"do": "stubborn"}]
    reply = spawn(c, tasks)
    if reply.error is not None:
        return summary(reply)
    ids = tuple(status.id for status in reply.statuses)
    c.report(children=ids)
    cancelled = c.link.request(lambda number: m.AskCancel(number, ids[0], 0.02))
    first = wait(c, ids[1:], None, any_=True)
    return summary(first) if cancelled.error is None else summary(cancelled)


def do_poll_with_short_waits(c: Context) -> str:
    """Give the slot back and take it again, over and over."""
    reply = spawn(c, c.task["children"])
    if reply.error is not None:
        return summary(reply)
    ids = tuple(status.id for status in reply.statuses)
    while not all(status.done for status in reply.statuses):
        reply = wait(c, ids, 0.01)
    return summary(reply)


def do_leave_a_thread(c: Context) -> str:
    """Answer while another thread of this process still waits for a child."""
    import threading

    reply = spawn(c, [{"do": "pause"}])
    if reply.error is not None:
        return summary(reply)
    ids = tuple(status.id for status in reply.statuses)
    threading.Thread(target=wait, args=(c, ids), daemon=True).start()
    return summary(wait(c, ids, 0.02))


def do_answer_then_linger(c: Context) -> None:
    """Send an answer, and then do not end."""
    c.link.notify(m.Answer("early"))
    c.report()
    pause()
