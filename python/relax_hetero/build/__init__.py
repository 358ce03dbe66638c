"""From a module at any stage to an executable."""
