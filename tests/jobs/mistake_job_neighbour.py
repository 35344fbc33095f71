"""What mistake_job.py imports."""

HERE = __name__
