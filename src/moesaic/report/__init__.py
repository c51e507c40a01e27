"""The report about one or more runs: numbers (`summary`), charts (`charts`, `layers`) and the page (`page`)."""
