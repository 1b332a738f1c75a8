/*
 * As leaky.c, in C++: it reads commands, a letter and a number of four digits, and answers each with one byte.
 */
#include <cstdlib>
#include <new>
#include <unistd.h>

#define OWN extern "C" __attribute__((noinline, noclone))

struct object {
	char bytes[24];
};

static object *objects[1000];
static char *arrays[1000];
static int object_count, array_count;

OWN void leak_object()
{
	objects[object_count++] = new object();
}

OWN void leak_array()
{
	arrays[array_count++] = new char[700];
}

OWN void leak_nothrow()
{
	arrays[array_count++] = new (std::nothrow) char[50];
}

static void obey(char what, int count)
{
	if (what == 'd') {
		while (object_count > 0)
			delete objects[--object_count];
		while (array_count > 0)
			delete[] arrays[--array_count];
	}
	for (int i = 0; i < count; i++)
		(what == 'o' ? leak_object : what == 'a' ? leak_array : leak_nothrow)();
}

int main()
{
	char order[6] = "";

	if (write(1, ".", 1) != 1)
		return 1;
	while (read(0, order, 5) == 5) {
		obey(order[0], atoi(order + 1));
		if (write(1, ".", 1) != 1)
			return 1;
	}
	return 0;
}
