"""Pipeline schedules: the order of each stage's actions within a step."""
