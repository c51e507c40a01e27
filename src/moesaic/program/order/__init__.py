"""Orders: in which sequence the tasks of a program are issued; the dependencies stay."""
