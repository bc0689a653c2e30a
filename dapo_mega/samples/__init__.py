"""What the model said: the responses of every step and evaluation as files, and the page that shows them"""
