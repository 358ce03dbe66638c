"""Vdevices and their look-up, targets for this computer, back ends, and tables of facts about CPUs and GPUs."""
