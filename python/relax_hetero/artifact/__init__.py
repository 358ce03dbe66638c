"""Executables as plain data: metadata, signatures, commands, schedules, memory plans, and the container file.

Needs neither the compiler nor a device: the compiler writes these, the virtual machine reads them.
"""
