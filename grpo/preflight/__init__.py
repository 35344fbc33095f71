"""What is looked at before anything is loaded or a device touched: the model's name, the data's first row, the rewards.

`trainer`, `recipes`, `plan` and `doctor` import it: they refuse what the trainer refuses. It may import the settings'
rooms. It must not know engines, groups or how many ranks there are.
"""
