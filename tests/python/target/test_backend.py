"""Devices of a back end in the order of their links."""

import pytest

from relax_hetero.target.backend import Backend

SOCKETS = {frozenset(pair) for pair in ((0, 2), (1, 3), (0, 4), (2, 4))}


class Linked(Backend):
    """Devices, some of which access each other's memory; of None nothing is known."""

    def __init__(self, links, devices):
        super().__init__("linked")
        self._links, self._devices = links, devices

    def count(self):
        return self._devices

    def accesses_peer(self, index, peer):
        return None if self._links is None else {index, peer} in self._links


@pytest.mark.parametrize(
    ("links", "devices", "count", "expected"),
    [
        (SOCKETS, 5, 2, [0, 2, 1, 3, 4]),
        (SOCKETS, 5, 3, [0, 2, 4, 1, 3]),
        (SOCKETS, 5, 4, [0, 1, 2, 3, 4]),
        (SOCKETS, 5, 1, [0, 1, 2, 3, 4]),
        (set(), 3, 2, [0, 1, 2]),
        (None, 4, 2, [0, 1, 2, 3]),
        (None, 0, 2, []),
    ],
)
def test_groups_access_each_others_memory(links, devices, count, expected):
    assert Linked(links, devices).in_order_of_links(count) == expected


def test_a_link_has_both_directions():
    backend = Linked(set(), 3)
    backend.accesses_peer = lambda index, peer: (index, peer) in {(0, 1), (0, 2), (2, 0)}
    assert backend.in_order_of_links(2) == [0, 2, 1]
