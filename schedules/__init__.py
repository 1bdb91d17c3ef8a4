"""Who runs what when: schedules as data, with no torch in them."""
