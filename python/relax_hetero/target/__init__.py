"""Devices and machines: vdevices and their look-up, targets for this machine, and facts about CPUs."""
