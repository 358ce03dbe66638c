"""Checks of the installation, and completion of commands by a shell."""
