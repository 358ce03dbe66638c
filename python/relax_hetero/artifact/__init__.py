"""Executables as plain data: metadata, signatures, commands, schedules, memory plans, and the container file.

The compiler writes them and the virtual machine reads them; they need neither the compiler nor a device.
"""
