"""Reports as HTML pages: about runs (`page`, from `summary`, `charts` and `balance`), plans (`plan_page`) and programs (`gantt`)."""
