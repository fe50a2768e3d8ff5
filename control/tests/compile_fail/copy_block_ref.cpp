// A block has one owner.
#include "quickturn/control/arena.hpp"

using namespace quickturn::control;

BlockRef pass(BlockRef& block) {
#ifdef MUST_NOT_COMPILE
  return block;
#else
  return std::move(block);
#endif
}
