"""What the virtual machine runs: transfers, memory plans, packed results."""
