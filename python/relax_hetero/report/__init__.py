"""Data of reports, tables of HTML and pages, about models, executables and runs."""
