// What is remembered of a session: where its last turn ended in the prefix index, so that older tails go
// first and a tool call is waited for. Only hashes are kept: a block that was evicted meanwhile is simply not
// found.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "quickturn/control/hash.hpp"
#include "quickturn/control/types.hpp"

namespace quickturn::control {

struct Session {
  std::uint64_t stamp = 0;  // of its last use: the least recently used sessions are forgotten
  std::vector<Hash128>
      checkpoints;  // of its last turn: before the end of the prompt, there, end of the answer
  Hash128 tip;      // end of its last turn
  std::uint32_t depth = 0;
  double hold_seconds = 0.0;  // asked for while its turn still ran
};

class Sessions {
 public:
  static constexpr std::size_t kMost = 65536;

  Session* find(const std::string& name) {
    const auto found = sessions_.find(name);
    return found == sessions_.end() ? nullptr : &found->second;
  }
  Session& use(const std::string& name) {
    Session& session = sessions_[name];
    if (session.stamp != 0) by_stamp_.erase(session.stamp);
    session.stamp = ++clock_;
    by_stamp_.emplace(session.stamp, name);
    if (sessions_.size() > kMost) {
      sessions_.erase(by_stamp_.begin()->second);
      by_stamp_.erase(by_stamp_.begin());
    }
    return session;
  }
  std::size_t size() const { return sessions_.size(); }

 private:
  std::unordered_map<std::string, Session> sessions_;
  std::map<std::uint64_t, std::string> by_stamp_;
  std::uint64_t clock_ = 0;
};

}  // namespace quickturn::control
