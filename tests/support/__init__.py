"""What every suite shares: calls as data (`cases`), how to make them (`calls`), how close is close
(`closeness`), where it runs (`target`).
"""
