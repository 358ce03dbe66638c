"""Calls that go through queues: one queue a device, fences, overlapped calls, traces."""
