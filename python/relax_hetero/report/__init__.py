"""Reports about models, executables and runs: data, tables and HTML pages."""
