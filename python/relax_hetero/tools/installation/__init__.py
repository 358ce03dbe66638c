"""What is installed here, whether it works, and how a shell completes commands."""
