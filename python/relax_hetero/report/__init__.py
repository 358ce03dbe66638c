"""What is known of models, executables and runs, to look at: data of reports, tables of HTML, pages."""
