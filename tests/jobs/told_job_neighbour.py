"""What told_job.py imports."""

HERE = __name__
