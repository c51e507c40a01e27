"""HTML reports: on runs (`page`, from `summary`, `charts` and `balance`), plans (`plan_page`) and
programs (`gantt`)."""
