"""A trace as the timeline of a report: what each queue did, in seconds from the first event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..vm.queue.trace import Trace

_KINDS = {"step": "step", "transfer": "transfer", "result": "wait"}


def timeline_of(trace: Trace, devices: Sequence[str]) -> dict[str, Any] | None:
    """The steps and transfers of the calls that have ended, by queue; None where there are none.

    Parameters
    ----------
    trace : Trace
    devices : sequence of str
        Their names.
    """
    events = trace.events()
    names = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    slices = [e for e in events if e["ph"] == "X" and e.get("cat") in _KINDS]
    start = min((e["ts"] for e in slices), default=0.0)
    queues: dict[int, dict[str, Any]] = {}
    for event in sorted(slices, key=lambda event: (event["tid"], event["ts"])):
        track, args = event["tid"], event["args"]
        queue = queues.setdefault(track, {"name": names.get(track, str(track)), "device": None, "events": []})
        queue["device"] = queue["device"] or args.get("device", "").partition(",")[0] or None
        begin = (event["ts"] - start) / 1e6
        queue["events"].append(
            {
                "name": event["name"],
                "call": args.get("call", 0),
                "begin": begin,
                "end": begin + event["dur"] / 1e6,
                "kind": _KINDS[event["cat"]],
                "args": {key: value for key, value in args.items() if key != "call"},
            }
        )
    for queue in queues.values():
        named = max((name for name in devices if name in queue["name"]), key=len, default="host")  # llvm:1, llvm:10
        queue["device"] = queue["device"] or named
    return {"calls": len(trace.ended), "queues": list(queues.values())} if queues else None
